#include "profile_measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <memory>
#include <mutex>
#include <optional>

#include "flashoverlap/in_process.h"
#include "flashoverlap/operators.h"
#include "flashoverlap/version.h"
#include "matrices.h"
#include "tuning_options.h"

namespace flashoverlap::cli {
namespace {

constexpr double kMib = 1024.0 * 1024.0;
constexpr std::array<std::int64_t, 4> kDepths = {64, 256, 1024, 3072};
constexpr std::array<std::int64_t, 3> kTiles = {64, 128, 256};
constexpr std::int64_t kWaves = 8;
constexpr std::int64_t kSmallestMessage = 1024;
constexpr std::int64_t kLargestMessage = 16 << 20;
constexpr std::array kCollectives = {TransferKind::kAllReduce, TransferKind::kReduceScatter,
                                     TransferKind::kAllToAll};

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Quartiles {
  double median = 0;
  double spread = 0;  ///< Half the distance between the quartiles.
};

Quartiles quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double fraction) {
    return values[static_cast<std::size_t>(std::lround(fraction * static_cast<double>(values.size() - 1)))];
  };
  return {at(0.5), (at(0.75) - at(0.25)) / 2};
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

/// Times calls that all ranks make at once: from the first one's begin to the last one's end.
class RankTimes {
 public:
  RankTimes(std::int64_t ranks, std::int64_t repetitions)
      : begins_(static_cast<std::size_t>(repetitions), std::vector<double>(static_cast<std::size_t>(ranks))),
        ends_(begins_) {}

  void time(Communicator& communicator, std::int64_t repetition, const std::function<void()>& call) {
    communicator.exchange(std::uint64_t{0}, {.operation = "start of a measured call"});
    const auto i = static_cast<std::size_t>(repetition);
    const auto rank = static_cast<std::size_t>(communicator.rank());
    begins_[i][rank] = now_us();
    call();
    ends_[i][rank] = now_us();
  }

  [[nodiscard]] Quartiles result() const {
    std::vector<double> durations;
    for (std::size_t i = 0; i < begins_.size(); ++i) {
      durations.push_back(*std::max_element(ends_[i].begin(), ends_[i].end()) -
                          *std::min_element(begins_[i].begin(), begins_[i].end()));
    }
    return quartiles(std::move(durations));
  }

 private:
  std::vector<std::vector<double>> begins_, ends_;  ///< By repetition and rank.
};

/// One GEMM + all-reduce on every rank.
struct Case {
  GemmOptions gemm;
  Operands operands;
  Matrix a, b, out;

  explicit Case(const GemmOptions& options) : gemm(options) {
    a = random_matrix(gemm.m, gemm.k, gemm.dtype, 1, 1);
    b = random_matrix(gemm.n, gemm.k, gemm.dtype, 1, 2);
    out = Matrix(gemm.m, gemm.n, gemm.dtype);
    operands.a = a.data();
    operands.lda = gemm.k;
    operands.b = b.data();
    operands.ldb = gemm.k;
    operands.out = out.data();
    operands.ldo = gemm.n;
  }
};

class Profiler {
 public:
  Profiler(const ProfileOptions& options, const Progress& progress) : options_(options), progress_(progress) {
    num_steps_ = static_cast<std::int64_t>(options.dtypes.size() * kTiles.size() * kDepths.size()) + 2;
    for (std::int64_t bytes = kSmallestMessage; bytes <= kLargestMessage; bytes *= 2) {
      num_steps_ += static_cast<std::int64_t>(kCollectives.size());
    }
  }

  MachineProfile run() {
    MachineProfile profile;
    describe(profile);
    run_ranks(static_cast<int>(options_.ranks), {}, [&](const std::shared_ptr<Communicator>& communicator) {
      Context context(communicator, {.num_threads = static_cast<int>(options_.threads)});
      const bool first = communicator->rank() == 0;
      measure_launch(context, first ? &profile : nullptr);
      for (const DType dtype : options_.dtypes) measure_gemms(context, dtype, first ? &profile : nullptr);
      for (const TransferKind kind : kCollectives) {
        if (options_.ranks > 1) measure_collective(*communicator, kind, first ? &profile : nullptr);
      }
      measure_overlap(context, first ? &profile : nullptr);
    });
    report("done");
    return profile;
  }

 private:
  void describe(MachineProfile& profile) const {
    const MachineIdentity here = this_machine();
    profile.name = fmt::format("cpu-{}x{}", options_.ranks, options_.threads);
    profile.description = fmt::format("{} ranks x {} threads of one process on {}", options_.ranks,
                                      options_.threads, here.device);
    profile.provenance = {
        .kind = "measured",
        .date = today(),
        .device = here.device,
        .driver = here.driver,
        .libraries = here.libraries,
        .sources = {fmt::format("flashoverlap {} profile, medians of {}", kVersion, options_.repetitions)}};
    profile.units = options_.threads;
  }

  void report(const std::string& next) { progress_(steps_done_, num_steps_, next); }

  /// All ranks call it; rank 0 reports and the others share what is measured.
  Quartiles timed(Context& context, const std::function<void()>& call, const std::string& what) {
    Communicator& communicator = context.communicator();
    return timed(communicator, call, what);
  }

  Quartiles timed(Communicator& communicator, const std::function<void()>& call, const std::string& what) {
    if (communicator.rank() == 0) {
      report(what);
      times_ = std::make_unique<RankTimes>(options_.ranks, options_.repetitions);
    }
    communicator.exchange(std::uint64_t{0}, {.operation = "profile step"});
    call();  // warm-up
    for (std::int64_t i = 0; i < options_.repetitions; ++i) times_->time(communicator, i, call);
    communicator.exchange(std::uint64_t{0}, {.operation = "profile step done"});
    const Quartiles result = times_->result();
    communicator.exchange(std::uint64_t{0}, {.operation = "profile step read"});
    if (communicator.rank() == 0) ++steps_done_;
    return result;
  }

  void measure_launch(Context& context, MachineProfile* profile) {
    Case tiny({.m = 8 * options_.threads,
               .n = 8,
               .k = 8,
               .tile_m = 8,
               .tile_n = 8,
               .swizzle = 1,
               .partition = {1}});
    GemmAllReduce op(context, tiny.gemm);
    const Quartiles time = timed(
        context, [&] { op.run(tiny.operands, Method::kSerial, Mode::kPlainGemm, nullptr); }, "launch");
    if (profile != nullptr) profile->gemm.launch_us = time.median;
  }

  void measure_gemms(Context& context, DType dtype, MachineProfile* profile) {
    for (const std::int64_t tile : kTiles) {
      std::vector<GemmSample> samples;
      for (const std::int64_t depth : kDepths) {
        const std::int64_t columns = 4;
        Case gemm({.m = tile * kWaves / columns * options_.threads,
                   .n = tile * columns,
                   .k = depth,
                   .dtype = dtype,
                   .tile_m = tile,
                   .tile_n = tile,
                   .swizzle = 1,
                   .partition = {kWaves / 2, kWaves / 2}});
        GemmAllReduce op(context, gemm.gemm);
        const Quartiles time = timed(
            context, [&] { op.run(gemm.operands, Method::kOverlap, Mode::kGemmOnly, nullptr); },
            fmt::format("GEMM {} tile {}x{} k={}", name_of(dtype), tile, tile, depth));
        samples.push_back(
            {gemm.gemm.m, gemm.gemm.n, depth, dtype, tile, tile, options_.threads, time.median, time.spread});
      }
      if (profile == nullptr) continue;
      GemmKernel kernel = fit_gemm_kernel(samples, profile->gemm.launch_us, RaggedTiles::kProportional);
      kernel.source += " with packing and counting, all ranks at once";
      profile->gemm.kernels.push_back(std::move(kernel));
      profile->gemm.samples.insert(profile->gemm.samples.end(), samples.begin(), samples.end());
    }
  }

  void measure_collective(Communicator& communicator, TransferKind kind, MachineProfile* profile) {
    const std::unique_ptr<Stream> stream = communicator.make_stream("profile");
    std::vector<CurvePoint> points;
    for (std::int64_t bytes = kSmallestMessage; bytes <= kLargestMessage; bytes *= 2) {
      const std::int64_t share = bytes / 4 / options_.ranks;
      const std::int64_t count = share * options_.ranks;
      if (count == 0) continue;
      std::vector<float> send(static_cast<std::size_t>(count), 1);
      std::vector<float> receive(send);
      const std::vector<std::int64_t> counts(static_cast<std::size_t>(options_.ranks), share);
      const TransferLabel label{.operation = "profile"};
      const auto call = [&] {
        if (kind == TransferKind::kAllReduce) {
          communicator.all_reduce(send.data(), send.data(), count, DType::kFloat32, *stream, label);
        } else if (kind == TransferKind::kReduceScatter) {
          float* own = send.data() + communicator.rank() * share;
          communicator.reduce_scatter(send.data(), own, counts, DType::kFloat32, *stream, label);
        } else {
          communicator.all_to_all(send.data(), counts, receive.data(), counts, DType::kFloat32, *stream,
                                  label);
        }
        stream->synchronize();
      };
      const Quartiles time =
          timed(communicator, call, fmt::format("{} of {} bytes", name_of(kind), count * 4));
      points.push_back({static_cast<double>(count * 4), time.median, time.spread});
    }
    if (profile == nullptr) return;
    profile->curves.push_back({.collective = kind,
                               .world_size = options_.ranks,
                               .units = 0,
                               .dtype = {},
                               .curve = BandwidthCurve(std::move(points), std::string(name_of(kind))),
                               .source = "measured, in-process communicator, not paced, float32"});
  }

  /// What shows only when both run: the way from a group's last tile to its transfer, the pass that restores
  /// the order, and what communication takes from the computation. Alone and overlapped runs take turns.
  void measure_overlap(Context& context, MachineProfile* profile) {
    const std::int64_t tile = 128;
    Case gemm({.m = tile * 4 * options_.threads,
               .n = tile * 4,
               .k = 256,
               .tile_m = tile,
               .tile_n = tile,
               .swizzle = 1,
               .partition = std::vector<std::int64_t>(16, 1)});
    GemmAllReduce op(context, gemm.gemm);
    Communicator& communicator = context.communicator();
    std::vector<double> signal, restore, stolen;
    if (communicator.rank() == 0) report("overlap");
    for (std::int64_t i = 0; i <= options_.repetitions; ++i) {
      Timeline alone, both;
      communicator.exchange(std::uint64_t{0}, {.operation = "profile overlap"});
      op.run(gemm.operands, Method::kOverlap, Mode::kGemmOnly, &alone);
      communicator.exchange(std::uint64_t{0}, {.operation = "profile overlap"});
      op.run(gemm.operands, Method::kOverlap, Mode::kRun, &both);
      if (i == 0) continue;  // warm-up
      collect(alone, both, op.plan(), signal, restore, stolen);
    }
    if (profile == nullptr) return;
    ++steps_done_;
    profile->signal_us = std::max(0.0, quartiles(std::move(signal)).median);
    if (options_.ranks < 2) return;
    profile->restore_us_per_mib = std::max(0.0, quartiles(std::move(restore)).median);
    profile->steal_us_per_mib = std::max(0.0, quartiles(std::move(stolen)).median);
  }

  static double end_of(const Timeline& timeline, SpanKind kind) {
    double end = 0;
    for (const Span& span : timeline.spans) {
      if (span.kind == kind) end = std::max(end, span.end_us);
    }
    return end;
  }

  static double begin_of(const Timeline& timeline) {
    double begin = 1e300;
    for (const Span& span : timeline.spans) begin = std::min(begin, span.begin_us);
    return begin;
  }

  static void collect(const Timeline& alone, const Timeline& both, const OverlapPlan& plan,
                      std::vector<double>& signal, std::vector<double>& restore,
                      std::vector<double>& stolen) {
    const double bytes = static_cast<double>(plan.output_rows * plan.output_cols * size_of(plan.dtype));
    // The first transfer waits for nothing but its group: the tiles of wave 0 are the first of each unit.
    std::vector<double> tile_ends;
    double first_transfer = 1e300;
    double last_transfer = 0;
    double last_epilogue = 0;
    for (const Span& span : both.spans) {
      if (span.kind == SpanKind::kCompute) tile_ends.push_back(span.end_us);
      if (span.kind == SpanKind::kCommunication) first_transfer = std::min(first_transfer, span.begin_us);
      if (span.kind == SpanKind::kCommunication) last_transfer = std::max(last_transfer, span.end_us);
      if (span.kind == SpanKind::kEpilogue) last_epilogue = std::max(last_epilogue, span.end_us);
    }
    std::sort(tile_ends.begin(), tile_ends.end());
    const auto first_wave = static_cast<std::size_t>(plan.resources.compute_units);
    if (first_wave <= tile_ends.size() && first_transfer < 1e300) {
      signal.push_back(std::max(0.0, first_transfer - tile_ends[first_wave - 1]));
    }
    if (last_epilogue > last_transfer) restore.push_back((last_epilogue - last_transfer) / (bytes / kMib));
    const double alone_us = end_of(alone, SpanKind::kCompute) - begin_of(alone);
    const double both_us = end_of(both, SpanKind::kCompute) - begin_of(both);
    stolen.push_back((both_us - alone_us) / (bytes / kMib));
  }

  ProfileOptions options_;
  const Progress& progress_;
  std::int64_t num_steps_ = 0;
  std::int64_t steps_done_ = 0;
  std::unique_ptr<RankTimes> times_;  ///< Of the step in progress; rank 0 makes it.
};

}  // namespace

MachineProfile measure_profile(const ProfileOptions& options, const Progress& progress) {
  return Profiler(options, progress).run();
}

}  // namespace flashoverlap::cli
