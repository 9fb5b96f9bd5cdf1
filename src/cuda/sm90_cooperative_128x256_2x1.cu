#include "sm90_launch.cuh"

namespace flashoverlap::cuda {
namespace {

template <class Element>
using Shape = sm90::Config<Element, sm90::Schedule::kCooperative, 128, 256, 2, 1, 4, 2>;

}  // namespace

extern const SignalGemmVariant kSm90Cooperative128x256Cluster2x1Bf16 =
    sm90::describe<Shape<cutlass::bfloat16_t>>("sm90_cooperative_128x256x64_2x1_bf16", 1.0);
extern const SignalGemmVariant kSm90Cooperative128x256Cluster2x1Fp16 =
    sm90::describe<Shape<cutlass::half_t>>("sm90_cooperative_128x256x64_2x1_fp16", 1.0);

}  // namespace flashoverlap::cuda
