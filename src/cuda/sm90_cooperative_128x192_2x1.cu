#include "sm90_launch.cuh"

namespace flashoverlap::cuda {
namespace {

template <class Element>
using Shape = sm90::Config<Element, sm90::Schedule::kCooperative, 128, 192, 2, 1, 4, 4>;

}  // namespace

extern const SignalGemmVariant kSm90Cooperative128x192Cluster2x1Bf16 =
    sm90::describe<Shape<cutlass::bfloat16_t>>("sm90_cooperative_128x192x64_2x1_bf16", 1.014);
extern const SignalGemmVariant kSm90Cooperative128x192Cluster2x1Fp16 =
    sm90::describe<Shape<cutlass::half_t>>("sm90_cooperative_128x192x64_2x1_fp16", 1.014);

}  // namespace flashoverlap::cuda
