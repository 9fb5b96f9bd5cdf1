#include "measure_machine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "check.h"
#include "core/fail.h"
#include "core/half.h"
#include "core/median.h"
#include "cuda_stream.h"
#include "device.h"
#include "driver_version.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/plan_builders.h"
#include "flashoverlap/version.h"
#include "gemm_choice.h"
#include "measure_transfers.h"
#include "nccl_library.h"
#include "runtime_library.h"
#include "sm_partition.h"

namespace flashoverlap::cuda {
namespace {

// Measured once on an H200 (docs/gpu-measurements.md): the start of a GEMM, and a wait kernel with the
// collective behind it.
constexpr double kLaunchUs = 2;
constexpr double kSignalUs = 6;

constexpr std::array kKinds = {TransferKind::kAllReduce, TransferKind::kReduceScatter,
                               TransferKind::kAllGather, TransferKind::kAllToAll,
                               TransferKind::kSend,      TransferKind::kPut};
constexpr std::int64_t kElement = 2;
// Of the measured GEMMs: enough tiles for many waves, and operands beyond the cache.
constexpr std::int64_t kM = 4096;
constexpr std::int64_t kN = 8192;
constexpr std::array<std::int64_t, 4> kKs = {1024, 2048, 4096, 8192};

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// Elements uniform in [-1, 1): what they are decides on the power that the GEMM takes, and so on its clock.
/// A block of random ones is repeated.
DeviceBuffer random_matrix(int device, std::int64_t count, DType dtype, unsigned seed) {
  constexpr std::int64_t kBlock = 1 << 20;
  std::vector<float> values(as_index(std::min(count, kBlock)));
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (float& value : values) value = uniform(random);
  std::vector<std::uint16_t> block(values.size());
  core::from_float(values.data(), dtype, block.data(), std::ssize(values));
  DeviceBuffer matrix(device, count * kElement, "an operand of a measured GEMM");
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    upload(device, static_cast<char*>(matrix.data()) + begin * kElement, block.data(),
           as_index(std::min(kBlock, count - begin) * kElement));
  }
  return matrix;
}

/// Variants to measure: one for each tile, the architecture's own where it has some.
std::vector<const SignalGemmVariant*> measured_variants(int device, DType dtype) {
  const std::vector<const SignalGemmVariant*> all = variants_for(device, dtype);
  const bool has_own =
      std::any_of(all.begin(), all.end(), [](const SignalGemmVariant* v) { return v->exact_capability; });
  std::vector<const SignalGemmVariant*> found;
  for (const SignalGemmVariant* variant : all) {
    if (has_own && !variant->exact_capability) continue;
    const bool is_known = std::any_of(found.begin(), found.end(), [&](const SignalGemmVariant* other) {
      return other->tile_rows == variant->tile_rows && other->tile_cols == variant->tile_cols;
    });
    if (!is_known) found.push_back(variant);
  }
  return found;
}

/// The signal GEMM alone, all ranks at once.
class GemmMeter {
 public:
  GemmMeter(std::shared_ptr<Communicator> communicator, const CudaOptions& options, std::int64_t repetitions)
      : communicator_(std::move(communicator)),
        options_(options),
        repetitions_(repetitions),
        stream_(make_cuda_stream(options)),
        sms_(options.partition.compute != nullptr ? options.partition.compute->num_sms()
                                                  : num_sms(options.device) - options.communication_sms),
        out_(options.device, kM * kN * kElement, "the product of a measured GEMM"),
        begin_(true),
        end_(true) {}

  /// Adds kernel and samples of one variant. Collective.
  void measure(const SignalGemmVariant& variant, DType dtype, const DeviceBuffer& a, const DeviceBuffer& b,
               GemmProfile& profile) {
    CudaOptions options = options_;
    options.gemm_variant = variant.name;
    const auto executor = make_cuda_executor(communicator_, options);
    std::vector<GemmSample> samples;
    for (const std::int64_t k : kKs) {
      PlanOptions shape;
      shape.rank = communicator_->rank();
      shape.world_size = communicator_->size();
      shape.dtype = dtype;
      shape.m = kM;
      shape.n = kN;
      shape.k = k;
      shape.tile_m = variant.tile_rows;
      shape.tile_n = variant.tile_cols;
      shape.swizzle = 8;
      shape.resources.compute_units = std::max(1, sms_ / variant.blocks_per_tile);
      samples.push_back({kM, kN, k, dtype, shape.tile_m, shape.tile_n, shape.resources.compute_units,
                         time_us(*executor, shape, a, b), 0});
    }
    GemmKernel kernel = fit_gemm_kernel(samples, profile.launch_us, RaggedTiles::kPadded);
    kernel.units_per_tile = variant.blocks_per_tile;
    kernel.source += fmt::format(", {}, all ranks at once", variant.name);
    profile.kernels.push_back(std::move(kernel));
    profile.samples.insert(profile.samples.end(), samples.begin(), samples.end());
  }

 private:
  double time_us(Executor& executor, const PlanOptions& shape, const DeviceBuffer& a, const DeviceBuffer& b) {
    auto* const stream = static_cast<cudaStream_t>(native_handle(*stream_));
    Operands operands;
    operands.a = a.data();
    operands.lda = shape.k;
    operands.b = b.data();
    operands.ldb = shape.k;
    operands.out = out_.data();
    operands.ldo = kN;
    operands.stream = stream;
    const auto plan = executor.prepare(plan_all_reduce(shape));
    const auto run = [&] { executor.execute(*plan, operands, Mode::kGemmOnly, nullptr); };
    run();
    stream_->synchronize();
    constexpr int kCalls = 4;  // of a batch
    std::vector<double> times;
    for (std::int64_t i = 0; i < repetitions_; ++i) {
      (void)communicator_->exchange(std::uint64_t{0}, {.operation = "a measured GEMM"});
      begin_.record(stream);
      for (int j = 0; j < kCalls; ++j) run();
      end_.record(stream);
      stream_->synchronize();
      float ms = 0;
      FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
      times.push_back(slowest_of(*communicator_, static_cast<double>(ms) * 1e3 / kCalls));
    }
    return core::median(times);
  }

  std::shared_ptr<Communicator> communicator_;
  const CudaOptions& options_;
  std::int64_t repetitions_;
  std::unique_ptr<Stream> stream_;
  int sms_;
  DeviceBuffer out_;
  Event begin_, end_;
};

void check(const MachineSettings& settings) {
  if (settings.communication_sms.empty() || settings.dtypes.empty()) {
    core::fail(
        ErrorKind::kBadArgument,
        "{} numbers of communication SMs and {} element types to measure, at least one of each is needed",
        settings.communication_sms.size(), settings.dtypes.size());
  }
  for (const DType dtype : settings.dtypes) {
    if (dtype == DType::kFloat32)
      core::fail(ErrorKind::kUnsupported, "the GPU executor computes bf16 and f16, not f32");
  }
}

/// Names the steps on rank 0.
class Steps {
 public:
  explicit Steps(const MachineSettings& settings) : settings_(settings) {
    total_ = std::ssize(settings.communication_sms) * std::ssize(kKinds) -
             (std::ssize(settings.communication_sms) - 1) +
             std::ssize(settings.dtypes);  // copies are measured once
  }
  void next(const Communicator& communicator, const std::string& name) {
    if (communicator.rank() == 0 && settings_.progress) settings_.progress(done_++, total_, name);
  }
  void end() const {
    if (settings_.progress) settings_.progress(total_, total_, "");
  }

 private:
  const MachineSettings& settings_;
  std::int64_t done_ = 0;  // written by rank 0's thread alone
  std::int64_t total_ = 0;
};

std::vector<CommunicationCurve> measure_curves(const std::shared_ptr<Communicator>& communicator,
                                               const RankPlacement& placement,
                                               const MachineSettings& settings, bool with_copies,
                                               PeerAddresses& addresses, Steps& steps) {
  std::vector<CommunicationCurve> curves;
  TransferMeter meter(communicator, placement, settings.repetitions, addresses);
  for (const TransferKind kind : kKinds) {
    if (kind == TransferKind::kPut && !with_copies) continue;
    steps.next(*communicator, fmt::format("{} beside {} SMs", name_of(kind), placement.max_ctas));
    curves.push_back(meter.measure(kind));
  }
  return curves;
}

GemmProfile measure_gemms(const std::shared_ptr<Communicator>& communicator, const CudaOptions& options,
                          const MachineSettings& settings, Steps& steps) {
  GemmProfile profile;
  profile.launch_us = kLaunchUs;
  GemmMeter meter(communicator, options, settings.repetitions);
  for (const DType dtype : settings.dtypes) {
    steps.next(*communicator, fmt::format("GEMMs of {}", name_of(dtype)));
    const DeviceBuffer a = random_matrix(options.device, kM * kKs.back(), dtype, 1);
    const DeviceBuffer b = random_matrix(options.device, kN * kKs.back(), dtype, 2);
    for (const SignalGemmVariant* variant : measured_variants(options.device, dtype))
      meter.measure(*variant, dtype, a, b, profile);
  }
  return profile;
}

/// Adds what ranks beside `sms` SMs take; the GEMMs and the copies where they are the first.
void measure_beside(int sms, bool is_first, const MachineSettings& settings, Steps& steps,
                    MachineProfile& profile) {
  const RankPlacement placement = place_ranks(settings.devices, sms, settings.transport);
  const RankCommunicators communicators(placement, {});
  PeerAddresses addresses(settings.devices.size());
  run_ranks(static_cast<int>(settings.devices.size()), {}, [&](const std::shared_ptr<Communicator>& control) {
    const CudaOptions& options = placement.ranks[as_index(control->rank())];
    const DeviceScope scope(options.device);
    const std::shared_ptr<Communicator> communicator = communicators.connect(control);
    try {
      auto curves = measure_curves(communicator, placement, settings, is_first, addresses, steps);
      GemmProfile gemm;
      if (is_first) gemm = measure_gemms(communicator, options, settings, steps);
      if (communicator->rank() != 0) return;
      profile.curves.insert(profile.curves.end(), curves.begin(), curves.end());
      if (is_first) profile.gemm = std::move(gemm);
    } catch (const std::exception& error) {
      communicator->abort(error.what());
      throw;
    }
  });
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string device_name(int device) {
  cudaDeviceProp properties{};
  FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

/// Of the ranks' devices, each once: "NVIDIA H200". How many there are is no part of it: profiles of several
/// numbers of ranks are of one machine.
std::string device_names(const std::vector<int>& devices) {
  std::set<std::string> names;
  for (const int device : devices) names.insert(device_name(device));
  return fmt::format("{}", fmt::join(names, " and "));
}

std::string describe_ranks(const RankPlacement& placement) {
  const std::set<int> different(placement.devices.begin(), placement.devices.end());
  return fmt::format("{} ranks on {} {} of one host, {}", placement.devices.size(), different.size(),
                     different.size() == 1 ? "device" : "devices", name_of(placement.transport));
}

}  // namespace

Provenance describe_machine(const RankPlacement& placement) {
  int runtime = 0;
  int driver = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  FLASHOVERLAP_CUDA_CHECK(cudaDriverGetVersion(&driver));
  Provenance machine;
  machine.device = device_names(placement.devices);
  machine.driver = driver_version();
  if (machine.driver.empty()) machine.driver = "for CUDA " + version_text(driver);
  machine.libraries["cuda"] = version_text(runtime);
  if (placement.transport == Transport::kNccl)
    machine.libraries["nccl"] = library_version_text(nccl().version);
  return machine;
}

MachineProfile measure_machine(const MachineSettings& settings) {
  check(settings);
  const RankPlacement first =
      place_ranks(settings.devices, settings.communication_sms.front(), settings.transport);
  MachineProfile profile;
  profile.provenance = describe_machine(first);
  profile.provenance.kind = "measured";
  profile.provenance.date = today();
  profile.provenance.sources = {
      fmt::format("{} of flashoverlap {}", settings.measured_by, kVersion),
      fmt::format(
          "launch_us {} and signal_us {} are taken over from measurements of one H200, not measured here; "
          "slowdown is left at 1",
          kLaunchUs, kSignalUs)};
  profile.name = fmt::format("{}-ranks-{}", settings.devices.size(), name_of(settings.transport));
  profile.description = fmt::format("{}, {}", profile.provenance.device, describe_ranks(first));
  profile.units = first.units;
  profile.signal_us = kSignalUs;
  Steps steps(settings);
  for (std::size_t i = 0; i < settings.communication_sms.size(); ++i)
    measure_beside(settings.communication_sms[i], i == 0, settings, steps, profile);
  steps.end();
  return profile;
}

}  // namespace flashoverlap::cuda
