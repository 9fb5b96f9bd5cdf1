#include <algorithm>
#include <memory>
#include <vector>

#include "check.h"
#include "device_copy.h"
#include "gemm_arguments.h"
#include "signal_gemm.h"
#include "sm80_kernel.cuh"

namespace flashoverlap::cuda {
namespace sm80 {
namespace {

template <class Config>
void load_kernel() {
  FLASHOVERLAP_CUDA_CHECK(cudaFuncSetAttribute(
      signal_gemm_sm80<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncSetAttribute(
      gated_gemm_sm80<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncSetAttribute(
      finishing_gemm_sm80<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
}

template <class Config>
class Prepared final : public PreparedGemm {
 public:
  explicit Prepared(const SignalGemmArguments& args)
      : params_{.operands = {.a = static_cast<const std::uint16_t*>(args.a),
                             .lda = args.lda,
                             .b = static_cast<const std::uint16_t*>(args.b),
                             .ldb = args.ldb,
                             .k = args.k},
                .blocks = nullptr,
                .num_blocks = static_cast<std::int32_t>(args.blocks.size()),
                .m = args.m,
                .weight_rows = args.n * args.num_weights,
                .tables = args.tables,
                .output = make_output_params(args),
                .counters = args.counters},
        gates_(args.gates),
        finish_(args.finish),
        blocks_(std::min(args.num_sms, args.tables.num_positions)) {
    if (!args.blocks.empty()) upload_blocks(args);
  }

  void launch(cudaStream_t stream) const override {
    if (gates_.needed != nullptr || params_.num_blocks > 0) {
      gated_gemm_sm80<Config>
          <<<blocks_, Config::kThreads, Config::kSharedBytes, stream>>>(params_, gates_, finish_);
    } else if (finish_.gates.needed != nullptr) {
      finishing_gemm_sm80<Config>
          <<<blocks_, Config::kThreads, Config::kSharedBytes, stream>>>(params_, finish_);
    } else {
      signal_gemm_sm80<Config><<<blocks_, Config::kThreads, Config::kSharedBytes, stream>>>(params_);
    }
    FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
  }

 private:
  void upload_blocks(const SignalGemmArguments& args) {
    std::vector<Operands> blocks;
    for (const OperandBlock& block : args.blocks) {
      blocks.push_back({.a = static_cast<const std::uint16_t*>(block.a),
                        .lda = block.depth,
                        .b = params_.operands.b + block.k_begin,
                        .ldb = args.ldb,
                        .k = block.depth});
    }
    blocks_of_a_ = copy_to_device(blocks.data(), blocks.size() * sizeof blocks.front(), "blocks of A");
    params_.blocks = static_cast<const Operands*>(blocks_of_a_.get());
  }

  KernelParams params_;
  std::shared_ptr<const void> blocks_of_a_;
  DeviceGates gates_;
  DeviceFinish finish_;
  int blocks_;
};

template <class Config>
std::unique_ptr<PreparedGemm> prepare(const SignalGemmArguments& args) {
  check_shape(args, 0);
  if (args.begun > 0) throw_bad_argument("signal GEMM on sm_80: tiles cannot be begun, %d are", args.begun);
  if (!are_operands_aligned(args, Config::kAlignment)) {
    throw_bad_argument(
        "signal GEMM on sm_80: A, B, lda, ldb and each block of A must be multiples of %d elements; got A "
        "%p, lda %lld, B %p, ldb %lld, %zu blocks",
        Config::kAlignment, args.a, static_cast<long long>(args.lda), args.b,
        static_cast<long long>(args.ldb), args.blocks.size());
  }
  load_kernel<Config>();
  return std::make_unique<Prepared<Config>>(args);
}

template <class Config>
constexpr SignalGemmVariant describe(const char* name) {
  return {.name = name,
          .type = Config::kIsBf16 ? GemmType::kBf16 : GemmType::kFp16,
          .min_compute_capability = 80,
          .exact_capability = false,
          .tile_rows = Config::kTileM,
          .tile_cols = Config::kTileN,
          .tile_k = Config::kTileK,
          .blocks_per_tile = 1,
          .signals_per_tile = 1,
          .walk = 0,
          .operand_alignment = Config::kAlignment,
          // Measured for the wide kernel on an H200 (0.35 of cuBLAS); the others are taken to be as quick.
          .relative_time = Config::kAlignment == 1 ? 6.0 : 2.9,
          .overhead_k = 64,
          .prepare = &prepare<Config>,
          .load = &load_kernel<Config>};
}

// Sixteen warps: with eight of 64 x 64 the latency of shared memory shows.
template <bool kIsBf16>
using Wide = Config<kIsBf16, 128, 256, 64, 32, 8>;
template <bool kIsBf16, int kAlignment>
using Square = Config<kIsBf16, 128, 128, 64, 32, kAlignment>;

}  // namespace
}  // namespace sm80

extern const SignalGemmVariant kSm80Wide8Bf16 =
    sm80::describe<sm80::Wide<true>>("sm80_128x256x32_align8_bf16");
extern const SignalGemmVariant kSm80Wide8Fp16 =
    sm80::describe<sm80::Wide<false>>("sm80_128x256x32_align8_fp16");
extern const SignalGemmVariant kSm80Square8Bf16 =
    sm80::describe<sm80::Square<true, 8>>("sm80_128x128x32_align8_bf16");
extern const SignalGemmVariant kSm80Square8Fp16 =
    sm80::describe<sm80::Square<false, 8>>("sm80_128x128x32_align8_fp16");
extern const SignalGemmVariant kSm80Square2Bf16 =
    sm80::describe<sm80::Square<true, 2>>("sm80_128x128x32_align2_bf16");
extern const SignalGemmVariant kSm80Square2Fp16 =
    sm80::describe<sm80::Square<false, 2>>("sm80_128x128x32_align2_fp16");
extern const SignalGemmVariant kSm80Square1Bf16 =
    sm80::describe<sm80::Square<true, 1>>("sm80_128x128x32_align1_bf16");
extern const SignalGemmVariant kSm80Square1Fp16 =
    sm80::describe<sm80::Square<false, 1>>("sm80_128x128x32_align1_fp16");

}  // namespace flashoverlap::cuda
