#include "machine_curves.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <stdexcept>

#include "check.h"
#include "core/median.h"
#include "cuda_stream.h"
#include "flashoverlap/cuda_context.h"
#include "flashoverlap/plan_builders.h"
#include "flashoverlap/version.h"
#include "gemm_choice.h"
#include "nccl_library.h"
#include "operator_bench.h"
#include "sm_partition.h"
#include "test_matrices.h"

namespace bench {
namespace {

using namespace flashoverlap;
using gpu_test::Group;
using gpu_test::Rank;

constexpr std::int64_t kSmallest = 64 << 10;  // bytes
constexpr std::int64_t kLargest = 256LL << 20;
constexpr std::int64_t kElement = 2;
constexpr std::array kKinds = {TransferKind::kAllReduce, TransferKind::kReduceScatter,
                               TransferKind::kAllGather, TransferKind::kAllToAll,
                               TransferKind::kSend,      TransferKind::kPut};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// Where each rank receives, so that its neighbour can copy there.
struct Addresses {
  std::vector<void*> receive;
  std::vector<int> device;
};

class RankCurves {
 public:
  RankCurves(Rank& rank, const CurveSettings& settings, Addresses& addresses)
      : rank_(rank),
        settings_(settings),
        addresses_(addresses),
        stream_(rank.options.device, cuda::CudaStream::Priority::kHigh, rank.options.partition.communication),
        send_(rank.options.device, kLargest, "what is sent"),
        receive_(rank.options.device, kLargest, "what is received"),
        begin_(true),
        end_(true) {
    const auto index = static_cast<std::size_t>(rank.rank);
    addresses.receive[index] = receive_.data();
    addresses.device[index] = rank.options.device;
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(send_.data(), 0, kLargest, stream_.get()));
    stream_.synchronize();
    meet();
  }
  /// Nobody copies into this rank's memory any more.
  ~RankCurves() {
    try {
      meet();
    } catch (const Error&) {
    }
  }
  RankCurves(const RankCurves&) = delete;
  RankCurves& operator=(const RankCurves&) = delete;

  CommunicationCurve measure(TransferKind kind, std::int64_t units) {
    std::vector<CurvePoint> points;
    for (std::int64_t bytes = kSmallest; bytes <= kLargest; bytes *= 2) points.push_back(point(kind, bytes));
    return {.collective = kind,
            .world_size = rank_.world_size,
            .units = kind == TransferKind::kPut ? 0 : units,
            .dtype = std::nullopt,
            .curve = BandwidthCurve(std::move(points), std::string(name_of(kind))),
            .source = fmt::format("measured on {}: {}, medians of {}, bf16, all ranks at once, the slowest",
                                  today(),
                                  kind == TransferKind::kPut ? "cudaMemcpyPeerAsync to the next rank"
                                                             : "NCCL, also what it takes to start",
                                  settings_.repetitions)};
  }

 private:
  void meet() { (void)rank_.communicator->exchange(std::uint64_t{0}, {.operation = "bandwidth curves"}); }

  CurvePoint point(TransferKind kind, std::int64_t bytes) {
    const std::int64_t share = bytes / kElement / rank_.world_size / 8 * 8;
    const std::int64_t count = share * rank_.world_size;
    constexpr int kCalls = 4;  // of a batch
    call(kind, share);
    stream_.synchronize();
    std::vector<double> times;
    for (int i = 0; i < settings_.repetitions; ++i) {
      meet();
      begin_.record(stream_.get());
      for (int j = 0; j < kCalls; ++j) call(kind, share);
      end_.record(stream_.get());
      stream_.synchronize();
      float ms = 0;
      FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
      times.push_back(slowest_of(*rank_.communicator, static_cast<double>(ms) * 1e3 / kCalls));
    }
    std::sort(times.begin(), times.end());
    const std::size_t n = times.size();
    return {.bytes = static_cast<double>(count * kElement),
            .time_us = core::median(times),
            .spread_us = (times[n * 3 / 4] - times[n / 4]) / 2};
  }

  void call(TransferKind kind, std::int64_t share) {
    Communicator& ranks = *rank_.communicator;
    const int world = rank_.world_size;
    const TransferLabel label{.operation = "bandwidth curves"};
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(world), share);
    const auto next = static_cast<std::size_t>((rank_.rank + 1) % world);
    const auto at = [&](const cuda::DeviceBuffer& buffer) {
      return static_cast<char*>(buffer.data()) + share * rank_.rank * kElement;
    };
    switch (kind) {
      case TransferKind::kAllReduce:
        return ranks.all_reduce(send_.data(), receive_.data(), share * world, DType::kBFloat16, stream_,
                                label);
      case TransferKind::kReduceScatter:
        return ranks.reduce_scatter(send_.data(), at(send_), counts, DType::kBFloat16, stream_, label);
      case TransferKind::kAllGather:
        return ranks.all_gather(at(receive_), receive_.data(), counts, DType::kBFloat16, stream_, label);
      case TransferKind::kAllToAll:
        return ranks.all_to_all(send_.data(), counts, receive_.data(), counts, DType::kBFloat16, stream_,
                                label);
      case TransferKind::kSend: {
        std::vector<std::int64_t> sends(counts.size(), 0);
        std::vector<std::int64_t> receives(counts.size(), 0);
        sends[next] = share * world;
        receives[static_cast<std::size_t>((rank_.rank + world - 1) % world)] = share * world;
        return ranks.all_to_all(send_.data(), sends, receive_.data(), receives, DType::kBFloat16, stream_,
                                label);
      }
      case TransferKind::kPut:
        FLASHOVERLAP_CUDA_CHECK(cudaMemcpyPeerAsync(
            addresses_.receive[next], addresses_.device[next], send_.data(), rank_.options.device,
            static_cast<std::size_t>(share * world * kElement), stream_.get()));
        return;
      default:
        return;
    }
  }

  Rank& rank_;
  const CurveSettings& settings_;
  Addresses& addresses_;
  cuda::CudaStream stream_;
  cuda::DeviceBuffer send_, receive_;
  cuda::Event begin_, end_;
};

struct BlockTile {
  int rows = 0;
  int cols = 0;
};

/// What one SM computes of a tile that a cluster computes: profiles count SMs. A variant's name says it.
BlockTile block_tile(const cuda::SignalGemmVariant& variant) {
  const std::string name(variant.name);
  for (std::size_t at = name.find('_'); at != std::string::npos; at = name.find('_', at + 1)) {
    BlockTile tile;
    if (std::sscanf(name.c_str() + at, "_%dx%dx", &tile.rows, &tile.cols) != 2) continue;
    if (tile.rows * tile.cols * variant.blocks_per_tile == variant.tile_rows * variant.tile_cols) return tile;
  }
  throw std::runtime_error(fmt::format("the name of the GEMM {} does not say its block's tile", name));
}

/// The signal GEMM alone, all ranks at once: one kernel model for each tile.
void measure_gemms(Rank& rank, GemmProfile& profile) {
  const int device = rank.options.device;
  const int sms = rank.options.partition.compute != nullptr
                      ? rank.options.partition.compute->num_sms()
                      : cuda::num_sms(device) - rank.options.communication_sms;
  constexpr std::int64_t kN = 8192;
  constexpr std::int64_t kMaxM = 8192;
  constexpr std::int64_t kMaxK = 8192;
  const cuda::DeviceBuffer a(device, kMaxM * kMaxK * kElement, "A");
  const cuda::DeviceBuffer b(device, kN * kMaxK * kElement, "B");
  const cuda::DeviceBuffer out(device, kMaxM * kN * kElement, "out");
  const cuda::Event begin(true);
  const cuda::Event end(true);
  auto* const stream = static_cast<cudaStream_t>(rank.native_stream());
  fill_random(Element16::kBf16, a.data(), kMaxM * kMaxK, 1, stream);
  fill_random(Element16::kBf16, b.data(), kN * kMaxK, 2, stream);
  for (const cuda::SignalGemmVariant* variant : cuda::variants_for(device, DType::kBFloat16)) {
    if (!variant->exact_capability) continue;
    const BlockTile tile = block_tile(*variant);
    const auto is_known = [&](const GemmKernel& kernel) {
      return kernel.tile_m == tile.rows && kernel.tile_n == tile.cols;
    };
    if (std::any_of(profile.kernels.begin(), profile.kernels.end(), is_known)) continue;
    CudaOptions options = rank.options;
    options.gemm_variant = variant->name;
    const auto executor = make_cuda_executor(rank.communicator, options);
    std::vector<GemmSample> samples;
    for (const std::int64_t k : {1024, 2048, 4096, 8192}) {
      PlanOptions shape;
      shape.rank = rank.rank;
      shape.world_size = rank.world_size;
      shape.dtype = DType::kBFloat16;
      shape.m = kMaxM / 2;
      shape.n = kN;
      shape.k = k;
      shape.tile_m = variant->tile_rows;
      shape.tile_n = variant->tile_cols;
      shape.swizzle = 8;
      shape.resources.compute_units = sms / variant->blocks_per_tile;
      const auto plan = executor->prepare(plan_all_reduce(shape));
      Operands operands;
      operands.a = a.data();
      operands.lda = k;
      operands.b = b.data();
      operands.ldb = k;
      operands.out = out.data();
      operands.ldo = kN;
      operands.stream = stream;
      const auto run = [&] { executor->execute(*plan, operands, Mode::kGemmOnly, nullptr); };
      run();
      rank.stream->synchronize();
      std::vector<double> times;
      for (int i = 0; i < 5; ++i) {
        (void)rank.communicator->exchange(std::uint64_t{0}, {.operation = "a GEMM"});
        begin.record(stream);
        for (int j = 0; j < 4; ++j) run();
        end.record(stream);
        rank.stream->synchronize();
        float ms = 0;
        FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin.get(), end.get()));
        times.push_back(slowest_of(*rank.communicator, static_cast<double>(ms) * 1e3 / 4));
      }
      samples.push_back({shape.m, shape.n, k, DType::kBFloat16, tile.rows, tile.cols,
                         shape.resources.compute_units * variant->blocks_per_tile, core::median(times), 0});
    }
    GemmKernel kernel = fit_gemm_kernel(samples, profile.launch_us, RaggedTiles::kPadded);
    kernel.source += fmt::format(", {}, all ranks at once", variant->name);
    profile.kernels.push_back(std::move(kernel));
    profile.samples.insert(profile.samples.end(), samples.begin(), samples.end());
  }
}

void describe(MachineProfile& profile, const CurveSettings& settings) {
  cudaDeviceProp properties{};
  FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  int driver = 0;
  int runtime = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaDriverGetVersion(&driver));
  FLASHOVERLAP_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  profile.name = settings.rehearse ? fmt::format("rehearsal-{}", settings.world_size)
                                   : fmt::format("{}-gpus", cuda_device_count());
  profile.description =
      settings.rehearse ? fmt::format("one {} standing for {} ranks", properties.name, settings.world_size)
                        : fmt::format("{} x {} of one host", cuda_device_count(), properties.name);
  profile.provenance = {
      .kind = "measured",
      .date = today(),
      .device = properties.name,
      .driver = version_text(driver),
      .libraries = {{"cuda", version_text(runtime)}, {"nccl", cuda::nccl_version_text(cuda::nccl().version)}},
      .sources = {
          fmt::format("cluster_bench curves --ranks {} of flashoverlap {}", settings.world_size, kVersion),
          "launch_us 2 and signal_us 6 are taken over from measurements of one H200, not measured here; "
          "slowdown is left at 1"}};
  profile.units = properties.multiProcessorCount;
  constexpr double kLaunchUs = 2;
  constexpr double kSignalUs = 6;
  profile.gemm.launch_us = kLaunchUs;
  profile.signal_us = kSignalUs;
}

}  // namespace

MachineProfile measure_machine(const CurveSettings& settings) {
  MachineProfile profile;
  describe(profile, settings);
  bool is_first = true;
  for (const int sms : settings.communication_sms) {
    gpu_test::GroupOptions options;
    options.world_size = settings.world_size;
    options.kind = gpu_test::CommunicatorKind::kNccl;
    options.communication_sms = sms;
    options.poison = false;
    Group group(options);
    Addresses addresses{std::vector<void*>(static_cast<std::size_t>(settings.world_size)),
                        std::vector<int>(static_cast<std::size_t>(settings.world_size))};
    const std::int64_t ctas = std::max(1, settings.rehearse ? sms / settings.world_size : sms);
    group.run([&](Rank& rank) {
      std::vector<CommunicationCurve> curves;
      {
        RankCurves own(rank, settings, addresses);
        for (const TransferKind kind : kKinds) {
          if (kind == TransferKind::kPut && !is_first) continue;  // has no SMs
          curves.push_back(own.measure(kind, ctas));
        }
      }
      GemmProfile gemm;
      gemm.launch_us = profile.gemm.launch_us;
      if (is_first) measure_gemms(rank, gemm);
      if (rank.rank != 0) return;
      profile.curves.insert(profile.curves.end(), curves.begin(), curves.end());
      if (is_first) profile.gemm = std::move(gemm);
    });
    is_first = false;
  }
  return profile;
}

}  // namespace bench
