// One GPU stands for several: overlapped against serial (cuBLAS, one collective, one epilogue kernel) on the
// same SMs.
//
//   rehearsal [--ranks 2,4] [--ops ar,rs,a2a,ag] [--comm nccl|local] [--shapes MxNxK,...]
//   [--sms-communication 24]
//             [--sms-compute 0] [--epilogue norm|none] [--rounds 7] [--pause-ms 10] [--json FILE] [--trace
//             FILE]
//
// --ops ag: all-gather + GEMM; its partition is the number of parts in which a slice travels.
// Each rank has its own SM partition and streams; the partition for communication is shared, and each rank's
// collectives take an equal share of its SMs. Both methods end with the same epilogue, residual + RMSNorm (or
// none: then serial needs no kernel there, and overlapped only the restore). For each case the signal GEMM's
// variant and swizzle are chosen by the time of the plain GEMM; the collective is timed at some sizes; the
// partitions that the predictor likes best are tried, and the best of them is taken; then serial and
// overlapped are timed in turn. A batch is `kCalls` calls back to back, timed by events on each rank's
// stream; a case's time is the slowest rank's; tables have medians of batches.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>

#include "check.h"
#include "flashoverlap/cuda_context.h"
#include "gpu_ranks.h"
#include "nccl_library.h"
#include "operator_bench.h"
#include "runtime_library.h"

namespace {

using namespace flashoverlap;
using gpu_test::CommunicatorKind;
using gpu_test::Group;
using gpu_test::GroupOptions;
using gpu_test::Rank;

constexpr int kCalls = 8;  // of a batch

struct Settings {
  std::vector<int> ranks{2, 4};
  std::vector<std::string> ops{"ar", "rs", "a2a"};
  CommunicatorKind kind = CommunicatorKind::kNccl;
  std::vector<bench::Shape> shapes{
      {4096, 8192, 4096}, {4096, 8192, 7168}, {4096, 8192, 2048}, {2048, 8192, 8192}, {4096, 4096, 4096}};
  bench::OperatorSettings bench;
  int compute_sms = 0;
  double link_gbps = 0;
  std::string json;
  std::string trace;
};

[[noreturn]] void usage(const std::string& why) {
  std::fprintf(stderr, "rehearsal: %s; see the head of bench/gpu/rehearsal.cpp\n", why.c_str());
  std::exit(2);
}

Settings read_settings(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 >= argc) usage(name + " has no value");
    const std::string value = argv[i + 1];
    if (name == "--ranks") {
      settings.ranks.clear();
      for (const std::string& part : bench::split(value)) settings.ranks.push_back(std::stoi(part));
    } else if (name == "--ops") {
      settings.ops = bench::split(value);
    } else if (name == "--comm") {
      if (value != "nccl" && value != "local") usage("--comm is nccl or local, not " + value);
      settings.kind = value == "nccl" ? CommunicatorKind::kNccl : CommunicatorKind::kLocal;
    } else if (name == "--shapes") {
      settings.shapes = bench::parse_shapes(value);
    } else if (name == "--sms-communication") {
      settings.bench.communication_sms = std::stoi(value);
    } else if (name == "--sms-compute") {
      settings.compute_sms = std::stoi(value);
    } else if (name == "--rounds") {
      settings.bench.rounds = std::stoi(value);
    } else if (name == "--pause-ms") {
      settings.bench.pause_ms = std::stoi(value);
    } else if (name == "--link-gbps") {
      settings.link_gbps = std::stod(value);
    } else if (name == "--epilogue") {
      if (value != "norm" && value != "none") usage("--epilogue is norm or none, not " + value);
      settings.bench.with_epilogue = value == "norm";
    } else if (name == "--json") {
      settings.json = value;
    } else if (name == "--trace") {
      settings.trace = value;
    } else {
      usage("unknown option " + name);
    }
  }
  return settings;
}

void print(const bench::Result& r) {
  // In theory the shorter of GEMM and communication disappears.
  const double bound = r.us.serial - std::min(r.us.cublas, r.us.communication);
  const double speedup = r.us.serial / r.us.overlapped;
  const double share = speedup / (r.us.serial / bound);
  std::printf(
      "%5d %4s %6lldx%lldx%-6lld %7.0f %7.0f %7.0f %7.0f %7.0f %8.0f %8.0f %8.0f %6.2f %6.2f %6.2f %5u %5.1f "
      "%5.3f %s sw%lld %lld waves: %s\n",
      r.ranks, r.op.c_str(), static_cast<long long>(r.shape.m), static_cast<long long>(r.shape.n),
      static_cast<long long>(r.shape.k), r.us.cublas, r.us.plain, r.us.signal, r.us.communication,
      r.us.grouped, r.us.serial, r.us.overlapped, r.us.by_default, r.us.communication / r.us.cublas, speedup,
      share, r.wrong, 100 * r.predicted_error, r.favourite, r.variant.c_str(),
      static_cast<long long>(r.swizzle), static_cast<long long>(r.waves),
      bench::text_of(r.partition).c_str());
  std::fflush(stdout);
}

int run(const Settings& settings) {
  cudaDeviceProp properties{};
  FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  const bool is_nccl = settings.kind == CommunicatorKind::kNccl;
  const std::string version =
      is_nccl ? fmt::format(" {}", cuda::library_version_text(cuda::nccl().version)) : std::string{};
  std::printf(
      "# %s, %d SMs; communicator %s%s; %d SMs for communication, shared; bf16; times in us, medians of %d "
      "batches of %d calls\n",
      properties.name, properties.multiProcessorCount, gpu_test::name_of(settings.kind), version.c_str(),
      settings.bench.communication_sms, settings.bench.rounds, kCalls);
  std::printf(
      "# epilogue %s; ratio: communication / cuBLAS; speed: serial / overlap; share: speed / (serial / "
      "(serial - min(cublas, comm)))\n"
      "# err%%: predicted against measured, over the partitions tried; pick: best time tried / time of the "
      "predictor's favourite\n",
      settings.bench.with_epilogue ? "residual + RMSNorm" : "none");
  std::printf("%5s %4s %21s %7s %7s %7s %7s %7s %8s %8s %8s %6s %6s %6s %5s %5s %5s\n", "ranks", "op",
              "shape", "cublas", "plain", "signal", "comm", "grouped", "serial", "overlap", "default",
              "ratio", "speed", "share", "wrong", "err%", "pick");
  std::ofstream json(settings.json.empty() ? "/dev/null" : settings.json);
  Timeline timeline;
  std::mutex mutex;
  unsigned wrong = 0;
  for (const int world : settings.ranks) {
    GroupOptions options;
    options.world_size = world;
    options.kind = settings.kind;
    options.communication_sms = settings.bench.communication_sms;
    options.compute_sms = settings.compute_sms;
    options.poison = false;
    options.timeout = std::chrono::milliseconds(20'000);
    options.link.bandwidth_gbps = settings.link_gbps;
    Group group(options);
    for (const std::string& op : settings.ops) {
      for (const bench::Shape& shape : settings.shapes) {
        const bool traced = !settings.trace.empty() && timeline.spans.empty();
        Timeline of_case;
        group.run([&](Rank& rank) {
          Timeline own;
          bench::OperatorBench bench(rank, settings.bench, op, shape);
          const bench::Result result = bench.measure(traced ? &own : nullptr);
          const std::scoped_lock lock(mutex);
          of_case.spans.insert(of_case.spans.end(), own.spans.begin(), own.spans.end());
          wrong += result.wrong;
          if (rank.rank != 0) return;
          print(result);
          bench::append_json(json, result, gpu_test::name_of(settings.kind));
        });
        if (traced) timeline = std::move(of_case);
      }
    }
  }
  if (!settings.trace.empty()) {
    std::ofstream trace(settings.trace);
    write_chrome_trace(timeline, trace);
    std::printf("%s\n", to_text(timeline, 120).c_str());
  }
  std::printf(wrong == 0 ? "OK\n" : "FAILED: %u elements differ\n", wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  cuda::prepare_environment();
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  const Settings settings = read_settings(argc, argv);
  if (cuda_device_count() == 0) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  try {
    return run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rehearsal: %s\n", error.what());
    return 1;
  }
}
