// What is measured on a machine of several GPUs, in parts that scripts/gpu_cluster_bench.py calls:
//
//   cluster_bench topology [--json FILE]            devices, and which of them address each other's memory
//   cluster_bench curves --ranks W [--rehearse] [--sms-communication 16] [--json FILE]
//                                                   bandwidth curves and GEMMs as a machine profile
//   cluster_bench table --ranks W [--rehearse] [--ops ag,ar,rs] [--shapes MxNxK,...] [--sms-communication 24]
//                       [--rounds 5] [--budget-s 0] [--json FILE] [--trace FILE]
//                                                   serial against overlapped; one JSON object a case and
//                                                   line
//
// Rank r is a thread on device r; with --rehearse all are on device 0, each on SMs of its own. With
// --budget-s no case begins after so many seconds. The GEMM is the one that the executor suggests, as users
// get it; among partitions the quickest is taken (operator_bench.h). Without a CUDA device: "skipped: no CUDA
// device".
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <stdexcept>

#include "check.h"
#include "flashoverlap/cuda_context.h"
#include "machine_curves.h"
#include "nccl_library.h"
#include "operator_bench.h"

namespace {

using namespace flashoverlap;
using gpu_test::Group;
using gpu_test::GroupOptions;
using gpu_test::Rank;
using Clock = std::chrono::steady_clock;

/// "--name value" pairs; "--rehearse" alone.
class Arguments {
 public:
  Arguments(int argc, char** argv, int first) {
    for (int i = first; i < argc; ++i) {
      const std::string name = argv[i];
      if (name == "--rehearse") {
        values_.insert_or_assign(name, std::string("1"));
      } else if (!name.starts_with("--")) {
        throw std::runtime_error(fmt::format("'{}' is not an option", name));
      } else if (i + 1 == argc) {
        throw std::runtime_error(fmt::format("{} has no value", name));
      } else {
        values_[name] = argv[++i];
      }
    }
  }
  std::string take(const std::string& name, const std::string& otherwise) {
    const auto found = values_.find(name);
    if (found == values_.end()) return otherwise;
    std::string value = found->second;
    values_.erase(found);
    return value;
  }
  int take_int(const std::string& name, int otherwise) {
    const std::string text = take(name, std::to_string(otherwise));
    std::size_t used = 0;
    const int value = text.empty() ? -1 : std::stoi(text, &used);
    if (used != text.size() || value < 0)
      throw std::runtime_error(fmt::format("{} {}: expected an integer >= 0", name, text));
    return value;
  }
  void expect_none_left() const {
    if (!values_.empty())
      throw std::runtime_error(fmt::format("{} is not accepted here", values_.begin()->first));
  }

 private:
  std::map<std::string, std::string> values_;
};

int print_topology(Arguments& arguments) {
  const std::string path = arguments.take("--json", "");
  arguments.expect_none_left();
  std::string json = "{\"devices\":[";
  const int count = cuda_device_count();
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    std::string peers;
    for (int peer = 0; peer < count; ++peer) {
      int reachable = 0;
      if (peer != device) FLASHOVERLAP_CUDA_CHECK(cudaDeviceCanAccessPeer(&reachable, device, peer));
      if (reachable != 0) peers += fmt::format("{}{}", peers.empty() ? "" : ",", peer);
    }
    fmt::print("device {}: {}, {} SMs, {} MiB, addresses the memory of [{}]\n", device, properties.name,
               properties.multiProcessorCount, properties.totalGlobalMem >> 20U, peers);
    json += fmt::format(R"({}{{"name":"{}","sms":{},"peers":[{}]}})", device == 0 ? "" : ",", properties.name,
                        properties.multiProcessorCount, peers);
  }
  const cuda::NcclLibrary& nccl = cuda::nccl();
  fmt::print("NCCL {} ({})\n", cuda::nccl_version_text(nccl.version), nccl.path);
  json += fmt::format("],\"nccl\":\"{}\"}}\n", cuda::nccl_version_text(nccl.version));
  if (!path.empty()) std::ofstream(path) << json;
  return 0;
}

/// Where ranks run: each on a device of its own, or all on one.
int place(Arguments& arguments, bool& rehearse) {
  const int world = arguments.take_int("--ranks", 2);
  rehearse = !arguments.take("--rehearse", "").empty();
  if (world < 2) throw std::runtime_error(fmt::format("--ranks {}: at least 2", world));
  std::vector<int> devices;
  for (int device = 0; !rehearse && device < cuda_device_count(); ++device) devices.push_back(device);
  if (!rehearse && std::ssize(devices) < world) {
    throw std::runtime_error(
        fmt::format("--ranks {}, but {} devices here; --rehearse puts all on one", world, devices.size()));
  }
  gpu_test::use_devices(devices);
  return world;
}

int measure_curves(Arguments& arguments) {
  bench::CurveSettings settings;
  settings.world_size = place(arguments, settings.rehearse);
  settings.communication_sms.clear();
  for (const std::string& part : bench::split(arguments.take("--sms-communication", "16")))
    settings.communication_sms.push_back(std::stoi(part));
  const std::string path = arguments.take("--json", "profile.json");
  arguments.expect_none_left();
  const MachineProfile profile = bench::measure_machine(settings);
  for (const CommunicationCurve& curve : profile.curves) {
    fmt::print("{} of {} ranks on {} SMs:", name_of(curve.collective), curve.world_size, curve.units);
    for (const CurvePoint& point : curve.curve.points())
      fmt::print(" {:.0f} KiB {:.1f} us {:.1f} GB/s,", point.bytes / 1024, point.time_us,
                 point.bytes / point.time_us / 1e3);
    fmt::print("\n");
  }
  std::ofstream file(path);
  file << to_json(profile);
  file.close();
  // Whoever reads it finds it as it was meant.
  (void)load_machine_profile(path.find('/') == std::string::npos ? fmt::format("./{}", path) : path);
  return 0;
}

struct TableSettings {
  int world = 2;
  bool rehearse = false;
  std::vector<std::string> ops;
  std::vector<bench::Shape> shapes;
  bench::OperatorSettings bench;
  int budget_s = 0;
  std::string json, trace;
};

TableSettings read_table(Arguments& arguments) {
  TableSettings settings;
  settings.world = place(arguments, settings.rehearse);
  settings.ops = bench::split(arguments.take("--ops", "ag,ar,rs"));
  settings.shapes = bench::parse_shapes(arguments.take("--shapes", "4096x8192x2048"));
  settings.bench.communication_sms = arguments.take_int("--sms-communication", 24);
  settings.bench.rounds = std::max(1, arguments.take_int("--rounds", 5));
  settings.bench.pause_ms = arguments.take_int("--pause-ms", 5);
  settings.bench.search_gemm = false;
  settings.budget_s = arguments.take_int("--budget-s", 0);
  settings.json = arguments.take("--json", "");
  settings.trace = arguments.take("--trace", "");
  arguments.expect_none_left();
  return settings;
}

void print_case(const bench::Result& r) {
  const double bound = r.us.serial - std::min(r.us.cublas, r.us.communication);
  fmt::print(
      "{} {} {}x{}x{}: cuBLAS {:.0f} signal {:.0f} collective {:.0f} serial {:.0f} overlapped {:.0f} ({}, "
      "{}) default {:.0f} bound {:.0f} speed-up {:.3f} predicted {:.0f} wrong {}\n",
      r.ranks, r.op, r.shape.m, r.shape.n, r.shape.k, r.us.cublas, r.us.signal, r.us.communication,
      r.us.serial, r.us.overlapped, r.method, bench::text_of(r.partition), r.us.by_default, bound,
      r.us.serial / r.us.overlapped, r.predicted_us, r.wrong);
  std::fflush(stdout);
}

int measure_table(Arguments& arguments) {
  const TableSettings settings = read_table(arguments);
  const auto begin = Clock::now();
  const auto is_late = [&] {
    return settings.budget_s > 0 && Clock::now() - begin > std::chrono::seconds(settings.budget_s);
  };
  GroupOptions options;
  options.world_size = settings.world;
  options.kind = gpu_test::CommunicatorKind::kNccl;
  options.communication_sms = settings.bench.communication_sms;
  options.poison = false;
  options.timeout = std::chrono::milliseconds(15'000);
  Group group(options);
  std::ofstream json(settings.json.empty() ? "/dev/null" : settings.json);
  Timeline timeline;
  std::mutex mutex;
  unsigned wrong = 0;
  std::size_t left_out = 0;
  for (const std::string& op : settings.ops) {
    for (const bench::Shape& shape : settings.shapes) {
      if (is_late()) {
        ++left_out;
        continue;
      }
      const bool is_traced = !settings.trace.empty() && timeline.spans.empty();
      Timeline of_case;
      group.run([&](Rank& rank) {
        Timeline own;
        bench::OperatorBench bench(rank, settings.bench, op, shape);
        const bench::Result result = bench.measure(is_traced ? &own : nullptr);
        const std::scoped_lock lock(mutex);
        of_case.spans.insert(of_case.spans.end(), own.spans.begin(), own.spans.end());
        wrong += result.wrong;
        if (rank.rank != 0) return;
        print_case(result);
        bench::append_json(json, result, settings.bench, "nccl");
      });
      if (is_traced) timeline = std::move(of_case);
    }
  }
  if (!settings.trace.empty()) {
    std::ofstream trace(settings.trace);
    write_chrome_trace(timeline, trace);
  }
  if (left_out > 0) fmt::print("{} cases left out: --budget-s {}\n", left_out, settings.budget_s);
  std::puts(wrong == 0 ? "OK" : "FAILED: elements differ");
  return wrong == 0 ? 0 : 1;
}

int run(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  Arguments arguments(argc, argv, 2);
  if (part == "topology") return print_topology(arguments);
  if (part == "curves") return measure_curves(arguments);
  if (part == "table") return measure_table(arguments);
  throw std::runtime_error(fmt::format("'{}' is not one of topology, curves, table", part));
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  if (cuda_device_count() == 0) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cluster_bench: %s\n", error.what());
    return 2;
  }
}
