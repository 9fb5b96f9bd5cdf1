#include "sm90_launch.cuh"

namespace flashoverlap::cuda {
namespace {

template <class Element>
using Shape = sm90::Config<Element, sm90::Schedule::kPingpong, 64, 256, 2, 1, 4, 4>;

}  // namespace

extern const SignalGemmVariant kSm90Pingpong64x256Cluster2x1Bf16 =
    sm90::describe<Shape<cutlass::bfloat16_t>>("sm90_pingpong_64x256x64_2x1_bf16", 1.31);
extern const SignalGemmVariant kSm90Pingpong64x256Cluster2x1Fp16 =
    sm90::describe<Shape<cutlass::half_t>>("sm90_pingpong_64x256x64_2x1_fp16", 1.31);

}  // namespace flashoverlap::cuda
