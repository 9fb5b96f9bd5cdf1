#include "sm90_launch.cuh"

namespace flashoverlap::cuda {
namespace {

template <class Element>
using Shape = sm90::Config<Element, sm90::Schedule::kCooperative, 128, 256, 1, 2, 4, 2>;

}  // namespace

extern const SignalGemmVariant kSm90Cooperative128x256Cluster1x2Bf16 =
    sm90::describe<Shape<cutlass::bfloat16_t>>("sm90_cooperative_128x256x64_1x2_bf16", 1.005);
extern const SignalGemmVariant kSm90Cooperative128x256Cluster1x2Fp16 =
    sm90::describe<Shape<cutlass::half_t>>("sm90_cooperative_128x256x64_1x2_fp16", 1.005);

}  // namespace flashoverlap::cuda
