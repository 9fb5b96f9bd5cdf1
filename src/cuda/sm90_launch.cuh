// Host side of the sm_90a signal GEMM: arguments to parameters, and the launch.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

#include "check.h"
#include "device_copy.h"
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

/// Tiles that a cluster works on in turn: a cluster's consumer takes every second one of a pingpong kernel.
template <class Config>
constexpr int kWalk = Config::kIsPingpong ? 2 : 1;

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
  FLASHOVERLAP_CUDA_CHECK(cudaFuncSetAttribute(
      block_gemm_sm90<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Config>));
}

template <class Config>
typename Config::Mainloop::Params make_operands(const SignalGemmArguments& args, const void* a,
                                                std::int64_t lda, const void* b, int depth) {
  using Element = typename Config::Element;
  const int weight_rows = args.n * args.num_weights;
  const typename Config::StrideRowMajor stride_a{lda, {}, lda * args.m};
  const typename Config::StrideRowMajor stride_b{args.ldb, {}, args.ldb * weight_rows};
  return Config::Mainloop::to_underlying_arguments(
      cute::make_shape(args.m, weight_rows, depth, 1),
      {static_cast<const Element*>(a), stride_a, static_cast<const Element*>(b), stride_b}, nullptr);
}

/// Of one block, with its columns of B.
template <class Config>
BlockOperands<Config> make_block(const SignalGemmArguments& args, const OperandBlock& block) {
  const void* const b = static_cast<const std::uint16_t*>(args.b) + block.k_begin;
  return {make_operands<Config>(args, block.a, block.depth, b, block.depth), block.depth};
}

template <class Config>
KernelParams<Config> make_params(const SignalGemmArguments& args) {
  KernelParams<Config> params{};
  params.mainloop = args.blocks.empty() ? make_operands<Config>(args, args.a, args.lda, args.b, args.k)
                                        : make_block<Config>(args, args.blocks.front()).mainloop;
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
  if (!are_operands_aligned(args, kCopyEngineElements)) {
    throw_bad_argument(
        "signal GEMM on sm_90a: A, B, lda, ldb and each block of A must be multiples of 16 bytes; got A %p, "
        "lda %lld, B %p, ldb %lld, %zu blocks",
        args.a, static_cast<long long>(args.lda), args.b, static_cast<long long>(args.ldb),
        args.blocks.size());
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

/// Blocks of A as the kernel reads them.
template <class Config>
class DeviceBlocks {
 public:
  explicit DeviceBlocks(const SignalGemmArguments& args) {
    if (args.blocks.empty()) return;
    std::vector<BlockOperands<Config>> blocks;
    const auto k_tiles = [](int depth) { return (depth + Config::kTileK - 1) / Config::kTileK; };
    for (const OperandBlock& block : args.blocks) {
      blocks.push_back(make_block<Config>(args, block));
      params_.all_k_tiles += k_tiles(block.depth);
    }
    memory_ = copy_to_device(blocks.data(), blocks.size() * sizeof blocks.front(), "descriptors of blocks");
    params_.blocks = static_cast<const BlockOperands<Config>*>(memory_.get());
    params_.num_blocks = static_cast<std::int32_t>(blocks.size());
    params_.first_k_tiles = k_tiles(args.blocks.front().depth);
    params_.begun = args.begun;
    params_.sums = static_cast<float4*>(args.sums);
  }
  [[nodiscard]] const typename BlockInput<Config>::Params& params() const { return params_; }

 private:
  std::shared_ptr<const void> memory_;
  typename BlockInput<Config>::Params params_;
};

template <class Config>
class Prepared final : public PreparedGemm {
 public:
  explicit Prepared(const SignalGemmArguments& args)
      : params_(make_params<Config>(args)), blocks_of_a_(args), gates_(args.gates), finish_(args.finish) {
    const int clusters =
        std::min(args.num_sms / Config::kClusterBlocks, std::max(1, args.tables.num_positions));
    blocks_ = clusters * Config::kClusterBlocks;
    if (args.begun % (clusters * kWalk<Config>) != 0 || 2 * args.begun > args.tables.num_positions)
      throw_bad_argument("signal GEMM: %d tiles of %d positions are begun by %d clusters that walk by %d",
                         args.begun, args.tables.num_positions, clusters, kWalk<Config>);
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
    if (blocks_of_a_.params().num_blocks > 0) {
      FLASHOVERLAP_CUDA_CHECK(cudaLaunchKernelEx(&config, block_gemm_sm90<Config>, params_,
                                                 blocks_of_a_.params(), gates_, finish_));
    } else if (gates_.needed != nullptr) {
      FLASHOVERLAP_CUDA_CHECK(cudaLaunchKernelEx(&config, gated_gemm_sm90<Config>, params_, gates_, finish_));
    } else if (finish_.gates.needed != nullptr) {
      FLASHOVERLAP_CUDA_CHECK(cudaLaunchKernelEx(&config, finishing_gemm_sm90<Config>, params_, finish_));
    } else {
      FLASHOVERLAP_CUDA_CHECK(cudaLaunchKernelEx(&config, signal_gemm_sm90<Config>, params_));
    }
  }

 private:
  KernelParams<Config> params_;
  DeviceBlocks<Config> blocks_of_a_;
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
          .walk = kWalk<Config>,
          .operand_alignment = kCopyEngineElements,
          .relative_time = relative_time,
          // A pingpong kernel stores one tile while it multiplies the next.
          .overhead_k = Config::kIsPingpong ? 0 : 64,
          .prepare = &prepare<Config>,
          .load = &load_kernel<Config>};
}

}  // namespace flashoverlap::cuda::sm90
