// One GPU stands for several: overlapped against serial (cuBLAS, one collective, one epilogue kernel) on the
// same SMs.
//
//   rehearsal [--ranks 2,4] [--ops ar,rs,a2a] [--comm nccl|local] [--shapes MxNxK,...] [--sms-communication
//   24]
//             [--sms-compute 0] [--epilogue norm|none] [--rounds 7] [--pause-ms 10] [--json FILE] [--trace
//             FILE]
//
// Each rank has its own SM partition and streams; the partition for communication is shared, and each rank's
// collectives take an equal share of its SMs. Both methods end with the same epilogue, residual + RMSNorm (or
// none: then serial needs no kernel there, and overlapped only the restore). For each case the signal GEMM's
// variant and swizzle are chosen by the time of the plain GEMM; the collective is timed at some sizes; the
// partitions that the predictor likes best are tried, and the best of them is taken; then serial and
// overlapped are timed in turn. A batch is `kCalls` calls back to back, timed by events on each rank's
// stream; a case's time is the slowest rank's; tables have medians of batches.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <thread>

#include "check.h"
#include "core/median.h"
#include "cuda_stream.h"
#include "device.h"
#include "flashoverlap/cuda_context.h"
#include "flashoverlap/partition_search.h"
#include "flashoverlap/plan_builders.h"
#include "gemm_choice.h"
#include "gpu_ranks.h"
#include "nccl_library.h"
#include "sm_partition.h"
#include "test_matrices.h"

namespace {

using namespace flashoverlap;
using gpu_test::CommunicatorKind;
using gpu_test::Group;
using gpu_test::GroupOptions;
using gpu_test::Rank;

constexpr int kCalls = 8;

struct Shape {
  std::int64_t m, n, k;
};

struct Settings {
  std::vector<int> ranks{2, 4};
  std::vector<std::string> ops{"ar", "rs", "a2a"};
  CommunicatorKind kind = CommunicatorKind::kNccl;
  std::vector<Shape> shapes{
      {4096, 8192, 4096}, {4096, 8192, 7168}, {4096, 8192, 2048}, {2048, 8192, 8192}, {4096, 4096, 4096}};
  int communication_sms = 24;
  int compute_sms = 0;
  int rounds = 7;
  int pause_ms = 10;
  double link_gbps = 0;
  bool with_epilogue = true;
  std::string json;
  std::string trace;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

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
      for (const std::string& part : split(value)) settings.ranks.push_back(std::stoi(part));
    } else if (name == "--ops") {
      settings.ops = split(value);
    } else if (name == "--comm") {
      if (value != "nccl" && value != "local") usage("--comm is nccl or local, not " + value);
      settings.kind = value == "nccl" ? CommunicatorKind::kNccl : CommunicatorKind::kLocal;
    } else if (name == "--shapes") {
      settings.shapes.clear();
      for (const std::string& part : split(value)) {
        long long m = 0, n = 0, k = 0;
        if (std::sscanf(part.c_str(), "%lldx%lldx%lld", &m, &n, &k) != 3) usage("--shapes has " + part);
        settings.shapes.push_back({m, n, k});
      }
    } else if (name == "--sms-communication") {
      settings.communication_sms = std::stoi(value);
    } else if (name == "--sms-compute") {
      settings.compute_sms = std::stoi(value);
    } else if (name == "--rounds") {
      settings.rounds = std::stoi(value);
    } else if (name == "--pause-ms") {
      settings.pause_ms = std::stoi(value);
    } else if (name == "--link-gbps") {
      settings.link_gbps = std::stod(value);
    } else if (name == "--epilogue") {
      if (value != "norm" && value != "none") usage("--epilogue is norm or none, not " + value);
      settings.with_epilogue = value == "norm";
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

using core::median;

struct Times {
  double cublas = 0, plain = 0,
         signal = 0;  // GEMM alone: cuBLAS, the signal GEMM without and with placement and signals
  double communication = 0, grouped = 0;  // transfers alone: in one call, in the plan's groups
  double serial = 0, overlapped = 0,
         by_default = 0;  // whole calls; by_default: without choosing the partition
};

struct Result {
  int ranks = 0;
  std::string op;
  Shape shape{};
  Times us;
  std::string variant;
  std::int64_t waves = 0;
  std::int64_t swizzle = 0;
  std::vector<std::int64_t> partition;
  double predicted_error = 0;  // mean of |predicted - measured| / measured over the partitions tried,
                               // calibrated on the default one
  double favourite = 0;        // best measured time / time of the predictor's favourite
  std::size_t tried = 0;
  unsigned wrong = 0;
};

// One rank's side of one case.
class Bench {
 public:
  Bench(Rank& rank, const Settings& settings, const std::string& op, const Shape& shape)
      : rank_(rank),
        settings_(settings),
        op_(op),
        shape_(shape),
        stream_(static_cast<cudaStream_t>(rank.native_stream())) {
    const std::int64_t rows = op == "rs" ? shape.m / rank.world_size : shape.m;
    a_ = cuda::DeviceBuffer(0, shape.m * shape.k * 2, "A");
    b_ = cuda::DeviceBuffer(0, shape.n * shape.k * 2, "B");
    out_ = cuda::DeviceBuffer(0, shape.m * shape.n * 2, "out");
    reference_ = cuda::DeviceBuffer(0, rows * shape.n * 2, "the serial output");
    const auto salt = static_cast<std::uint64_t>(rank.rank);
    bench::fill_random(bench::Element16::kBf16, a_.data(), shape.m * shape.k, 2 * salt + 1, stream_);
    bench::fill_random(bench::Element16::kBf16, b_.data(), shape.n * shape.k, 2 * salt + 2, stream_);
    weight_ = cuda::DeviceBuffer(0, shape.n * 2, "the norm's weight");
    residual_ = cuda::DeviceBuffer(0, rows * shape.n * 2, "the residual");
    bench::fill_random(bench::Element16::kBf16, weight_.data(), shape.n, 2 * salt + 100, stream_);
    bench::fill_random(bench::Element16::kBf16, residual_.data(), rows * shape.n, 2 * salt + 200, stream_);
    operands_ = {.a = a_.data(),
                 .lda = shape.k,
                 .b = b_.data(),
                 .ldb = shape.k,
                 .out = out_.data(),
                 .ldo = shape.n,
                 .epilogue = {},
                 .stream = stream_};
    if (settings.with_epilogue) {
      operands_.epilogue.residual = residual_.data();
      operands_.epilogue.residual_ld = shape.n;
      operands_.epilogue.rms_norm_weight = weight_.data();
    }
    begin_ = cuda::Event(true);
    end_ = cuda::Event(true);
    rank_.stream->synchronize();
  }

  ~Bench() {
    try {
      rank_.stream->synchronize();
    } catch (const Error&) {
    }
  }

  Result measure(Timeline* timeline) {
    choose_gemm();
    Result result;
    result.ranks = rank_.world_size;
    result.op = op_;
    result.shape = shape_;
    result.variant = variant_->name;
    result.swizzle = options_.swizzle;
    std::int64_t waves =
        op_ == "rs" ? num_waves_reduce_scatter(options_, RowOwnership::kContiguous) : num_waves(options_);
    result.waves = waves;
    const auto serial = prepare({waves});
    (void)batch(*serial, Mode::kRun, 2);
    const std::vector<std::int64_t> best = choose_partition(waves, result);
    const std::vector<std::int64_t> by_default = default_partition(waves);
    result.partition = best;
    const auto overlapped = prepare(best);
    const auto defaulted = prepare(by_default);
    result.wrong = compare(*serial, *overlapped);
    result.us = time_all(*serial, *overlapped, *defaulted);
    if (timeline != nullptr) {
      rank_.communicator->exchange(std::uint64_t{0}, {.operation = "traced call"});
      executor().execute(*serial, operands_, Mode::kRun, timeline);
      rank_.communicator->exchange(std::uint64_t{0}, {.operation = "traced call"});
      executor().execute(*overlapped, operands_, Mode::kRun, timeline);
    }
    rank_.stream->synchronize();
    return result;
  }

 private:
  Executor& executor() { return *executor_; }

  PlanOptions base_options() const {
    PlanOptions options;
    options.rank = rank_.rank;
    options.world_size = rank_.world_size;
    options.dtype = DType::kBFloat16;
    options.m = shape_.m;
    options.n = shape_.n;
    options.k = shape_.k;
    return options;
  }

  std::unique_ptr<PreparedPlan> prepare(const std::vector<std::int64_t>& partition) {
    PlanOptions options = options_;
    options.partition = partition;
    return executor().prepare(build(options));
  }

  OverlapPlan build(const PlanOptions& options) const {
    if (op_ == "ar") return plan_all_reduce(options);
    if (op_ == "rs") return plan_reduce_scatter(options, RowOwnership::kContiguous);
    // As tokens are routed: every row somewhere else, equally many everywhere.
    Routing routing;
    for (int r = 0; r < rank_.world_size; ++r) {
      std::vector<std::int32_t> destinations(static_cast<std::size_t>(shape_.m));
      for (std::size_t i = 0; i < destinations.size(); ++i) {
        destinations[i] = static_cast<std::int32_t>((i + static_cast<std::size_t>(r)) %
                                                    static_cast<std::size_t>(rank_.world_size));
      }
      routing.destinations.push_back(std::move(destinations));
    }
    return plan_all_to_all(options, routing);
  }

  // Variant and swizzle, by the time of the signal GEMM on this rank's SMs while all ranks compute.
  void choose_gemm() {
    double best_us = 1e30;
    for (const cuda::SignalGemmVariant* variant : cuda::variants_for(0, DType::kBFloat16)) {
      if (!variant->exact_capability) continue;
      auto executor = make_executor(variant->name);
      PlanOptions options = base_options();
      options.tile_m = variant->tile_rows;
      options.tile_n = variant->tile_cols;
      const int units = std::max(1, rank_.options.partition.compute->num_sms() / variant->blocks_per_tile);
      options.resources = {.compute_units = units,
                           .communication_units = settings_.communication_sms / rank_.world_size};
      for (const std::int64_t swizzle : {1, 2, 4, 8, 16}) {
        options.swizzle = swizzle;
        if ((swizzle - 1) * options.tile_m >= options.m) continue;
        const auto plan = executor->prepare(build(options));
        const double us = batch_on(*executor, *plan, Mode::kGemmOnly, 3);
        if (us < best_us) {
          best_us = us;
          variant_ = variant;
          options_ = options;
        }
      }
    }
    executor_ = make_executor(variant_->name);
  }

  std::unique_ptr<Executor> make_executor(const std::string& variant) {
    CudaOptions options = rank_.options;
    options.gemm_variant = variant;
    return make_cuda_executor(rank_.communicator, options);
  }

  // Time of the collective on the communication SMs, all ranks at once, at sizes up to the whole output.
  BandwidthCurve measure_curve() {
    cuda::CudaStream stream(0, cuda::CudaStream::Priority::kHigh, rank_.options.partition.communication);
    const std::int64_t world = rank_.world_size;
    const std::int64_t whole = shape_.m * shape_.n;
    const cuda::DeviceBuffer send(0, whole * 2, "a message");
    const cuda::DeviceBuffer receive(0, whole * 2, "a message");
    const TransferLabel label{.operation = "bandwidth curve"};
    std::vector<CurvePoint> points;
    for (std::int64_t part = 128; part >= 1; part /= 2) {
      const std::vector<std::int64_t> counts(static_cast<std::size_t>(world), whole / part / world / 8 * 8);
      const std::int64_t count = counts.front() * world;
      const auto call = [&] {
        if (op_ == "ar") {
          rank_.communicator->all_reduce(send.data(), send.data(), count, DType::kBFloat16, stream, label);
        } else if (op_ == "rs") {
          void* const own = static_cast<char*>(send.data()) + counts.front() * rank_.rank * 2;
          rank_.communicator->reduce_scatter(send.data(), own, counts, DType::kBFloat16, stream, label);
        } else {
          rank_.communicator->all_to_all(send.data(), counts, receive.data(), counts, DType::kBFloat16,
                                         stream, label);
        }
      };
      constexpr int kRepeats = 6;
      call();
      stream.synchronize();
      (void)rank_.communicator->exchange(std::uint64_t{0}, label);
      begin_.record(stream.get());
      for (int i = 0; i < kRepeats; ++i) call();
      end_.record(stream.get());
      stream.synchronize();
      points.push_back({.bytes = static_cast<double>(count * 2), .time_us = slowest_us(kRepeats)});
    }
    return BandwidthCurve(std::move(points), op_);
  }

  // Tries the default partition and those that the predictor likes best; the best measured one is taken. All
  // ranks decide by the same numbers.
  std::vector<std::int64_t> choose_partition(std::int64_t waves, Result& result) {
    const std::vector<std::int64_t> by_default = default_partition(waves);
    if (waves < 2) return by_default;
    const auto measured_us = [&](const std::vector<std::int64_t>& partition) {
      const auto plan = prepare(partition);
      (void)batch(*plan, Mode::kRun, 2);
      return std::min(
          {batch(*plan, Mode::kRun, 4), batch(*plan, Mode::kRun, 4), batch(*plan, Mode::kRun, 4)});
    };
    const auto finest = prepare(std::vector<std::int64_t>(static_cast<std::size_t>(waves), 1));
    const double gemm_us = std::min(batch(*finest, Mode::kGemmOnly, 4), batch(*finest, Mode::kGemmOnly, 4));
    const OverlapPlan& plan = finest->plan();
    OverlapCost cost{.finish_us = {}, .bytes = {}, .curve = measure_curve(), .signal_us = 6, .restore_us = 0};
    for (std::int64_t w = 0; w < waves; ++w) {
      cost.finish_us.push_back(gemm_us * static_cast<double>(w + 1) / static_cast<double>(waves));
      cost.bytes.push_back(plan.transfers[static_cast<std::size_t>(w)].source.count * 2);
    }
    // What the model leaves out, the slow-down of the GEMM by communication and the epilogue, is calibrated
    // on one partition.
    const double default_us = measured_us(by_default);
    cost.restore_us = std::max(0.0, default_us - predict(cost, by_default).total_us);
    std::vector<std::int64_t> best = by_default;
    double best_us = default_us;
    double favourite_us = 0;
    for (const PartitionChoice& choice : best_partitions(cost, 8)) {
      if (choice.partition.size() < 2) continue;
      const double us = measured_us(choice.partition);
      if (favourite_us == 0) favourite_us = us;
      result.predicted_error += std::abs(choice.prediction.total_us - us) / us;
      ++result.tried;
      if (us < best_us) {
        best_us = us;
        best = choice.partition;
      }
    }
    if (result.tried > 0) {
      result.predicted_error /= static_cast<double>(result.tried);
      result.favourite = best_us / favourite_us;
    }
    return best;
  }

  double batch(PreparedPlan& plan, Mode mode, int calls) { return batch_on(executor(), plan, mode, calls); }

  // Time of one call, of the slowest rank, the same on all ranks.
  double batch_on(Executor& executor, PreparedPlan& plan, Mode mode, int calls) {
    executor.execute(plan, operands_, mode, nullptr);
    rank_.stream->synchronize();
    (void)rank_.communicator->exchange(std::uint64_t{0}, {.operation = "start of a batch"});
    begin_.record(stream_);
    for (int i = 0; i < calls; ++i) executor.execute(plan, operands_, mode, nullptr);
    end_.record(stream_);
    rank_.stream->synchronize();
    return slowest_us(calls);
  }

  // From begin_ to end_, per call, of the slowest rank.
  double slowest_us(int calls) {
    float ms = 0;
    FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
    const double us = static_cast<double>(ms) * 1e3 / calls;
    double slowest = 0;
    for (const std::uint64_t bits :
         rank_.communicator->exchange(std::bit_cast<std::uint64_t>(us), {.operation = "batch"})) {
      slowest = std::max(slowest, std::bit_cast<double>(bits));
    }
    return slowest;
  }

  Times time_all(PreparedPlan& serial, PreparedPlan& overlapped, PreparedPlan& defaulted) {
    std::vector<double> samples[8];
    for (int round = 0; round < settings_.rounds; ++round) {
      samples[0].push_back(batch(serial, Mode::kGemmOnly, kCalls));
      samples[1].push_back(batch(overlapped, Mode::kPlainGemm, kCalls));
      samples[2].push_back(batch(overlapped, Mode::kGemmOnly, kCalls));
      samples[3].push_back(batch(serial, Mode::kCommunicationOnly, kCalls));
      samples[4].push_back(batch(overlapped, Mode::kCommunicationOnly, kCalls));
      samples[5].push_back(batch(serial, Mode::kRun, kCalls));
      samples[6].push_back(batch(overlapped, Mode::kRun, kCalls));
      samples[7].push_back(batch(defaulted, Mode::kRun, kCalls));
      std::this_thread::sleep_for(std::chrono::milliseconds(settings_.pause_ms));
    }
    return {.cublas = median(samples[0]),
            .plain = median(samples[1]),
            .signal = median(samples[2]),
            .communication = median(samples[3]),
            .grouped = median(samples[4]),
            .serial = median(samples[5]),
            .overlapped = median(samples[6]),
            .by_default = median(samples[7])};
  }

  // Elements of this rank in which the two methods differ by more than rounding: bf16 has 8 bits; an element
  // has a standard deviation of sqrt(k) / 3 on each rank.
  unsigned compare(PreparedPlan& serial, PreparedPlan& overlapped) {
    const std::int64_t rows = op_ == "rs" ? shape_.m / rank_.world_size : shape_.m;
    const auto bytes = static_cast<std::size_t>(rows * shape_.n * 2);
    cuda::DeviceBuffer counter(0, 4, "a counter");
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(counter.data(), 0, 4, stream_));
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(out_.data(), 0xFF, bytes, stream_));
    executor().execute(serial, operands_, Mode::kRun, nullptr);
    FLASHOVERLAP_CUDA_CHECK(
        cudaMemcpyAsync(reference_.data(), out_.data(), bytes, cudaMemcpyDeviceToDevice, stream_));
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(out_.data(), 0xFF, bytes, stream_));
    executor().execute(overlapped, operands_, Mode::kRun, nullptr);
    // After the norm elements are about 1 in size, before it sqrt(k) / 3 for each rank.
    const float absolute = settings_.with_epilogue ? 0.05F
                                                   : 0.02F * static_cast<float>(rank_.world_size) *
                                                         std::sqrt(static_cast<float>(shape_.k));
    bench::count_differences(bench::Element16::kBf16, out_.data(), reference_.data(), rows * shape_.n, 0.02F,
                             absolute, static_cast<unsigned*>(counter.data()), stream_);
    unsigned wrong = 0;
    rank_.stream->synchronize();
    FLASHOVERLAP_CUDA_CHECK(cudaMemcpyAsync(&wrong, counter.data(), 4, cudaMemcpyDeviceToHost, stream_));
    rank_.stream->synchronize();
    return wrong;
  }

  Rank& rank_;
  const Settings& settings_;
  std::string op_;
  Shape shape_;
  cudaStream_t stream_;
  cuda::DeviceBuffer a_, b_, out_, reference_, weight_, residual_;
  Operands operands_;
  cuda::Event begin_, end_;
  const cuda::SignalGemmVariant* variant_ = nullptr;
  PlanOptions options_;
  std::unique_ptr<Executor> executor_;
};

std::string text_of(const std::vector<std::int64_t>& values) {
  return fmt::format("{}", fmt::join(values, ","));
}

void print(const Result& r) {
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
      static_cast<long long>(r.swizzle), static_cast<long long>(r.waves), text_of(r.partition).c_str());
  std::fflush(stdout);
}

void append_json(std::ostream& out, const Result& r, const Settings& settings) {
  out << "{\"ranks\":" << r.ranks << ",\"op\":\"" << r.op << "\",\"m\":" << r.shape.m
      << ",\"n\":" << r.shape.n << ",\"k\":" << r.shape.k << ",\"communicator\":\""
      << gpu_test::name_of(settings.kind) << "\",\"sms_communication\":" << settings.communication_sms
      << ",\"cublas_us\":" << r.us.cublas << ",\"plain_us\":" << r.us.plain
      << ",\"signal_us\":" << r.us.signal << ",\"communication_us\":" << r.us.communication
      << ",\"grouped_us\":" << r.us.grouped << ",\"serial_us\":" << r.us.serial
      << ",\"overlapped_us\":" << r.us.overlapped << ",\"default_us\":" << r.us.by_default
      << ",\"variant\":\"" << r.variant << "\",\"swizzle\":" << r.swizzle << ",\"waves\":" << r.waves
      << ",\"partition\":[" << text_of(r.partition) << "],\"predicted_error\":" << r.predicted_error
      << ",\"favourite\":" << r.favourite << ",\"wrong\":" << r.wrong << "}\n";
}

int run(const Settings& settings) {
  cudaDeviceProp properties{};
  FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  const bool is_nccl = settings.kind == CommunicatorKind::kNccl;
  const std::string version =
      is_nccl ? fmt::format(" {}", cuda::nccl_version_text(cuda::nccl().version)) : std::string{};
  std::printf(
      "# %s, %d SMs; communicator %s%s; %d SMs for communication, shared; bf16; times in us, medians of %d "
      "batches of %d calls\n",
      properties.name, properties.multiProcessorCount, gpu_test::name_of(settings.kind), version.c_str(),
      settings.communication_sms, settings.rounds, kCalls);
  std::printf(
      "# epilogue %s; ratio: communication / cuBLAS; speed: serial / overlap; share: speed / (serial / "
      "(serial - min(cublas, comm)))\n"
      "# err%%: predicted against measured, over the partitions tried; pick: best time tried / time of the "
      "predictor's favourite\n",
      settings.with_epilogue ? "residual + RMSNorm" : "none");
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
    options.communication_sms = settings.communication_sms;
    options.compute_sms = settings.compute_sms;
    options.poison = false;
    options.timeout = std::chrono::milliseconds(20'000);
    options.link.bandwidth_gbps = settings.link_gbps;
    Group group(options);
    for (const std::string& op : settings.ops) {
      for (const Shape& shape : settings.shapes) {
        const bool traced = !settings.trace.empty() && timeline.spans.empty();
        Timeline of_case;
        group.run([&](Rank& rank) {
          Timeline own;
          Bench bench(rank, settings, op, shape);
          const Result result = bench.measure(traced ? &own : nullptr);
          const std::scoped_lock lock(mutex);
          of_case.spans.insert(of_case.spans.end(), own.spans.begin(), own.spans.end());
          wrong += result.wrong;
          if (rank.rank != 0) return;
          print(result);
          append_json(json, result, settings);
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
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
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
