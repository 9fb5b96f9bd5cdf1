#include "sm90_launch.cuh"

namespace flashoverlap::cuda {

using Cooperative128x256Bf16 = sm90::Config<cutlass::bfloat16_t, sm90::Schedule::kCooperative, 128, 256, 2, 1, 4, 2>;
extern const SignalGemmVariant kSm90Cooperative128x256Bf16 =
    sm90::describe<Cooperative128x256Bf16>("sm90_cooperative_128x256x64_2x1_bf16");

}  // namespace flashoverlap::cuda
