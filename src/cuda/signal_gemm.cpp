#include "signal_gemm.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace flashoverlap::cuda {

extern const SignalGemmVariant kSm90Cooperative128x192Cluster2x1Bf16, kSm90Cooperative128x192Cluster2x1Fp16;
extern const SignalGemmVariant kSm90Cooperative128x256Cluster1x2Bf16, kSm90Cooperative128x256Cluster1x2Fp16;
extern const SignalGemmVariant kSm90Cooperative128x256Cluster2x1Bf16, kSm90Cooperative128x256Cluster2x1Fp16;
extern const SignalGemmVariant kSm90Cooperative256x128Cluster1x2Bf16, kSm90Cooperative256x128Cluster1x2Fp16;
extern const SignalGemmVariant kSm90Pingpong128x128Cluster2x1Bf16, kSm90Pingpong128x128Cluster2x1Fp16;
extern const SignalGemmVariant kSm90Pingpong128x192Cluster2x1Bf16, kSm90Pingpong128x192Cluster2x1Fp16;
extern const SignalGemmVariant kSm90Pingpong64x256Cluster2x1Bf16, kSm90Pingpong64x256Cluster2x1Fp16;
extern const SignalGemmVariant kSm80Wide8Bf16, kSm80Wide8Fp16;
extern const SignalGemmVariant kSm80Square8Bf16, kSm80Square8Fp16;
extern const SignalGemmVariant kSm80Square2Bf16, kSm80Square2Fp16;
extern const SignalGemmVariant kSm80Square1Bf16, kSm80Square1Fp16;

bool are_operands_aligned(const SignalGemmArguments& arguments, int operand_alignment) {
  const auto is_aligned = [&](const void* matrix, std::int64_t ld) {
    const auto bytes = static_cast<std::uintptr_t>(operand_alignment) * 2;
    return reinterpret_cast<std::uintptr_t>(matrix) % bytes == 0 && ld % operand_alignment == 0;
  };
  if (!is_aligned(arguments.b, arguments.ldb)) return false;
  if (arguments.blocks.empty()) return is_aligned(arguments.a, arguments.lda);
  return std::ranges::all_of(arguments.blocks, [&](const OperandBlock& block) {
    return is_aligned(block.a, block.depth) && block.k_begin % operand_alignment == 0;
  });
}

std::span<const SignalGemmVariant* const> signal_gemm_variants() {
  static constexpr std::array kVariants = {&kSm90Cooperative128x192Cluster2x1Bf16,
                                           &kSm90Cooperative128x192Cluster2x1Fp16,
                                           &kSm90Cooperative128x256Cluster1x2Bf16,
                                           &kSm90Cooperative128x256Cluster1x2Fp16,
                                           &kSm90Cooperative128x256Cluster2x1Bf16,
                                           &kSm90Cooperative128x256Cluster2x1Fp16,
                                           &kSm90Cooperative256x128Cluster1x2Bf16,
                                           &kSm90Cooperative256x128Cluster1x2Fp16,
                                           &kSm90Pingpong128x128Cluster2x1Bf16,
                                           &kSm90Pingpong128x128Cluster2x1Fp16,
                                           &kSm90Pingpong128x192Cluster2x1Bf16,
                                           &kSm90Pingpong128x192Cluster2x1Fp16,
                                           &kSm90Pingpong64x256Cluster2x1Bf16,
                                           &kSm90Pingpong64x256Cluster2x1Fp16,
                                           &kSm80Wide8Bf16,
                                           &kSm80Wide8Fp16,
                                           &kSm80Square8Bf16,
                                           &kSm80Square8Fp16,
                                           &kSm80Square2Bf16,
                                           &kSm80Square2Fp16,
                                           &kSm80Square1Bf16,
                                           &kSm80Square1Fp16};
  return kVariants;
}

}  // namespace flashoverlap::cuda
