#include "signal_gemm.h"

#include <array>

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
