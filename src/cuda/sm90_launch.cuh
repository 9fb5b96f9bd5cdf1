// Host side of the sm_90a signal GEMM: arguments to parameters, and the launch.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>

#include "check.h"
#include "gemm_arguments.h"
#include "signal_gemm.h"
#include "sm90_kernel.cuh"
#include "tensor_map.h"

namespace flashoverlap::cuda::sm90 {

constexpr int kCopyEngineBytes = 16;  // alignment of addresses and strides
constexpr int kCopyEngineElements = kCopyEngineBytes / 2;

inline bool is_copy_engine_aligned(const void* pointer, std::int64_t ld) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kCopyEngineBytes == 0 && ld % kCopyEngineElements == 0;
}

template <class Config>
constexpr int kSharedBytes = static_cast<int>(sizeof(SharedStorage<Config>)) +
                             1024;  // alignment slack, see the kernel

template <class Config>
void load_kernel() {
  static_assert(kSharedBytes<Config> <= 232448, "shared memory of an sm_90 block");
  static_assert(Config::kStagingSlots >= 2, "the store warp frees a slot only when it holds the next");
  FLASHOVERLAP_CUDA_CHECK(cudaFuncSetAttribute(
      signal_gemm_sm90<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Config>));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncSetAttribute(
      gated_gemm_sm90<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Config>));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncSetAttribute(
      finishing_gemm_sm90<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Config>));
}

template <class Config>
KernelParams<Config> make_params(const SignalGemmArguments& args) {
  using Mainloop = typename Config::Mainloop;
  using Element = typename Config::Element;
  const auto shape = cute::make_shape(args.m, args.n * args.num_weights, args.k, 1);
  const typename Config::StrideRowMajor stride_a{args.lda, {}, args.lda * args.m};
  const typename Config::StrideRowMajor stride_b{args.ldb, {}, args.ldb * args.n * args.num_weights};
  KernelParams<Config> params{};
  params.mainloop = Mainloop::to_underlying_arguments(
      shape, {static_cast<const Element*>(args.a), stride_a, static_cast<const Element*>(args.b), stride_b},
      nullptr);
  params.m = args.m;
  params.k = args.k;
  params.weight_rows = args.n * args.num_weights;
  params.tables = args.tables;
  params.output = make_output_params(args);
  params.in_place_by_bulk = args.output != nullptr && is_copy_engine_aligned(args.output, args.ldd);
  params.counters = args.counters;
  if (params.in_place_by_bulk)
    params.in_place_map =
        make_store_map(args.output, params.output.rows, params.output.cols, args.ldd, kChunkRows);
  if (args.packed != nullptr && args.packed_size > 0) {
    constexpr int kWidth = Config::kPlanTileN;
    const std::int64_t rows = (args.packed_size + kWidth - 1) / kWidth;
    params.whole_map = make_store_map(args.packed, rows, kWidth, kWidth, kChunkRows);
    if (args.tables.slab_rows > 0)
      params.slab_map = make_store_map(args.packed, rows, kWidth, kWidth, args.tables.slab_rows);
  }
  return params;
}

template <class Config>
void check_arguments(const SignalGemmArguments& args) {
  check_shape(args, 1);
  if (!is_copy_engine_aligned(args.a, args.lda) || !is_copy_engine_aligned(args.b, args.ldb)) {
    throw_bad_argument(
        "signal GEMM on sm_90a: A, B, lda, ldb must be multiples of 16 bytes; got A %p, lda %lld, B %p, ldb "
        "%lld",
        args.a, static_cast<long long>(args.lda), args.b, static_cast<long long>(args.ldb));
  }
  if (args.packed != nullptr && !is_copy_engine_aligned(args.packed, 0)) {
    throw_bad_argument("signal GEMM on sm_90a: the packed buffer must be aligned to 16 bytes, got %p",
                       args.packed);
  }
  if (args.num_sms < Config::kClusterBlocks) {
    throw_bad_argument("signal GEMM: %d SMs asked for, a cluster needs %d", args.num_sms,
                       Config::kClusterBlocks);
  }
}

template <class Config>
class Prepared final : public PreparedGemm {
 public:
  explicit Prepared(const SignalGemmArguments& args)
      : params_(make_params<Config>(args)), gates_(args.gates), finish_(args.finish) {
    const int clusters =
        std::min(args.num_sms / Config::kClusterBlocks, std::max(1, args.tables.num_positions));
    blocks_ = clusters * Config::kClusterBlocks;
  }

  void launch(cudaStream_t stream) const override {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {Config::kClusterM, Config::kClusterN, 1};
    // Blocks may set up (barriers, descriptors, schedule) while the kernel before them in the stream ends;
    // they read operands and write only after that.
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    // CUTLASS reads the block's place in the cluster from x and y.
    config.gridDim = dim3(static_cast<unsigned>(blocks_ / Config::kClusterN), Config::kClusterN);
    config.blockDim = dim3(Config::kThreads);
    config.dynamicSmemBytes = kSharedBytes<Config>;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = std::size(attributes);
    if (gates_.needed != nullptr) {
      FLASHOVERLAP_CUDA_CHECK(cudaLaunchKernelEx(&config, gated_gemm_sm90<Config>, params_, gates_));
    } else if (finish_.gates.needed != nullptr) {
      FLASHOVERLAP_CUDA_CHECK(cudaLaunchKernelEx(&config, finishing_gemm_sm90<Config>, params_, finish_));
    } else {
      FLASHOVERLAP_CUDA_CHECK(cudaLaunchKernelEx(&config, signal_gemm_sm90<Config>, params_));
    }
  }

 private:
  KernelParams<Config> params_;
  DeviceGates gates_;
  DeviceFinish finish_;
  int blocks_ = 0;
};

template <class Config>
std::unique_ptr<PreparedGemm> prepare(const SignalGemmArguments& args) {
  check_arguments<Config>(args);
  load_kernel<Config>();
  return std::make_unique<Prepared<Config>>(args);
}

template <class Config>
constexpr SignalGemmVariant describe(const char* name, double relative_time) {
  return {.name = name,
          .type = std::is_same_v<typename Config::Element, cutlass::bfloat16_t> ? GemmType::kBf16
                                                                                : GemmType::kFp16,
          .min_compute_capability = 90,
          .exact_capability = true,
          .tile_rows = Config::kPlanTileM,
          .tile_cols = Config::kPlanTileN,
          .tile_k = Config::kTileK,
          .blocks_per_tile = Config::kClusterBlocks,
          .signals_per_tile = Config::kSignalsPerTile,
          .operand_alignment = kCopyEngineElements,
          .relative_time = relative_time,
          // A pingpong kernel stores one tile while it multiplies the next.
          .overhead_k = Config::kIsPingpong ? 0 : 64,
          .prepare = &prepare<Config>,
          .load = &load_kernel<Config>};
}

}  // namespace flashoverlap::cuda::sm90
