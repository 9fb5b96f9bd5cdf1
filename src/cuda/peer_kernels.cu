#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "check.h"
#include "flashoverlap/error.h"
#include "peer_copy.cuh"
#include "peer_kernels.h"
#include "ptx.cuh"

namespace flashoverlap::cuda {
namespace {

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(__half x) {
  return __half2float(x);
}
template <class Element>
__device__ __forceinline__ Element from_float(float x) {
  if constexpr (sizeof(Element) == sizeof(float)) {
    return x;
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <class Element>
__device__ __forceinline__ void reduce_element(const PeerReduceParams& params, std::int64_t i) {
  float sum = to_float(static_cast<const Element*>(params.from[0])[i]);
  for (int r = 1; r < params.num_from; ++r) sum += to_float(static_cast<const Element*>(params.from[r])[i]);
  for (int j = 0; j < params.num_to; ++j) static_cast<Element*>(params.to[j])[i] = from_float<Element>(sum);
}

template <class Element>
constexpr int kVector = 16 / static_cast<int>(sizeof(Element));

template <class Element>
__device__ __forceinline__ void add_vector(float (&sums)[kVector<Element>], const uint4 bits) {
  const auto* elements = reinterpret_cast<const Element*>(&bits);
#pragma unroll
  for (int i = 0; i < kVector<Element>; ++i) sums[i] += to_float(elements[i]);
}

template <class Element>
__device__ __forceinline__ void store_sums(const PeerReduceParams& params, std::int64_t v,
                                           const float (&sums)[kVector<Element>]) {
  uint4 bits;
  auto* elements = reinterpret_cast<Element*>(&bits);
#pragma unroll
  for (int i = 0; i < kVector<Element>; ++i) elements[i] = from_float<Element>(sums[i]);
  for (int j = 0; j < params.num_to; ++j) static_cast<uint4*>(params.to[j])[v] = bits;
}

// kAhead 16-byte vectors of every rank, `step` apart, as far as there are any: all loads before the first
// use. Not through the read-only cache: `to` may be the same memory.
template <class Element, int kFrom, int kAhead>
__device__ __forceinline__ void reduce_vectors(const PeerReduceParams& params, std::int64_t first,
                                               std::int64_t step, std::int64_t vectors) {
  uint4 loaded[kAhead][kFrom];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const std::int64_t v = first + a * step;
    if (v >= vectors) continue;
#pragma unroll
    for (int r = 0; r < kFrom; ++r) loaded[a][r] = static_cast<const uint4*>(params.from[r])[v];
  }
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const std::int64_t v = first + a * step;
    if (v >= vectors) continue;
    float sums[kVector<Element>] = {};
#pragma unroll
    for (int r = 0; r < kFrom; ++r) add_vector<Element>(sums, loaded[a][r]);
    store_sums<Element>(params, v, sums);
  }
}

// One vector of any number of ranks.
template <class Element>
__device__ __forceinline__ void reduce_vector(const PeerReduceParams& params, std::int64_t v) {
  float sums[kVector<Element>] = {};
  for (int r = 0; r < params.num_from; ++r)
    add_vector<Element>(sums, static_cast<const uint4*>(params.from[r])[v]);
  store_sums<Element>(params, v, sums);
}

// kFrom: the number of ranks; 0: any.
template <class Element, bool kAligned, int kFrom>
__global__ void __launch_bounds__(kPeerThreads)
    peer_reduce_kernel(const __grid_constant__ PeerReduceParams params) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kPeerThreads + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kPeerThreads;
  std::int64_t done = 0;
  if constexpr (kAligned) {
    const std::int64_t vectors = params.count / kVector<Element>;
    if constexpr (kFrom > 0) {
      constexpr int kAhead = kLoadsAhead / kFrom;
      for (std::int64_t v = first; v < vectors; v += kAhead * step)
        reduce_vectors<Element, kFrom, kAhead>(params, v, step, vectors);
    } else {
      for (std::int64_t v = first; v < vectors; v += step) reduce_vector<Element>(params, v);
    }
    done = vectors * kVector<Element>;
  }
  for (std::int64_t i = done + first; i < params.count; i += step) reduce_element<Element>(params, i);
}

// All blocks share each copy.
template <class Element, bool kAligned>
__global__ void __launch_bounds__(kPeerThreads)
    peer_copy_kernel(const __grid_constant__ PeerCopyParams params) {
  for (int copy = 0; copy < params.num_copies; ++copy) {
    const std::int64_t count = params.count[copy];
    std::int64_t done = 0;
    if constexpr (kAligned) {
      const std::int64_t vectors = count / kVector<Element>;
      copy_by_grid(static_cast<uint4*>(params.to[copy]), static_cast<const uint4*>(params.from[copy]),
                   vectors);
      done = vectors * kVector<Element>;
    }
    copy_by_grid(static_cast<Element*>(params.to[copy]) + done,
                 static_cast<const Element*>(params.from[copy]) + done, count - done);
  }
}

__global__ void pace_begin_kernel(std::uint64_t* begin_ns) {
  *begin_ns = ptx::global_timer_ns();
}

__global__ void pace_end_kernel(std::uint64_t* begin_ns, std::uint64_t duration_ns) {
  const std::uint64_t end = *begin_ns + duration_ns;
  std::uint64_t now = ptx::global_timer_ns();
  *begin_ns = now < end ? end : now;
  for (; now < end; now = ptx::global_timer_ns()) __nanosleep(200);
}

bool is_aligned(const void* pointer) {
  return pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

int blocks_for(std::int64_t count, int max_ctas) {
  constexpr std::int64_t kElementsPerBlock = kPeerThreads * 8;
  return static_cast<int>(
      std::clamp<std::int64_t>((count + kElementsPerBlock - 1) / kElementsPerBlock, 1, max_ctas));
}

template <class Function>
void with_element(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(float{});
    case DType::kBFloat16:
      return function(__nv_bfloat16{});
    case DType::kFloat16:
      return function(__half{});
  }
}

template <class Element>
auto reduce_kernel(bool aligned, int num_from) -> void (*)(PeerReduceParams) {
  if (!aligned) return peer_reduce_kernel<Element, false, 0>;
  switch (num_from) {
    case 2:
      return peer_reduce_kernel<Element, true, 2>;
    case 3:
      return peer_reduce_kernel<Element, true, 3>;
    case 4:
      return peer_reduce_kernel<Element, true, 4>;
    case 8:
      return peer_reduce_kernel<Element, true, 8>;
    default:
      return peer_reduce_kernel<Element, true, 0>;
  }
}

}  // namespace

void launch_peer_reduce(const PeerReduceParams& params, DType dtype, int max_ctas, cudaStream_t stream) {
  if (params.count == 0 || params.num_to == 0) return;
  bool aligned = true;
  for (int r = 0; r < params.num_from; ++r) aligned = aligned && is_aligned(params.from[r]);
  for (int j = 0; j < params.num_to; ++j) aligned = aligned && is_aligned(params.to[j]);
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto kernel = reduce_kernel<Element>(aligned, params.num_from);
    kernel<<<blocks_for(params.count, max_ctas), kPeerThreads, 0, stream>>>(params);
  });
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_peer_copy(const PeerCopyParams& params, DType dtype, int max_ctas, cudaStream_t stream) {
  std::int64_t longest = 0;
  bool aligned = true;
  for (int j = 0; j < params.num_copies; ++j) {
    longest = std::max(longest, params.count[j]);
    aligned = aligned && is_aligned(params.from[j]) && is_aligned(params.to[j]);
  }
  if (longest == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto kernel = aligned ? peer_copy_kernel<Element, true> : peer_copy_kernel<Element, false>;
    kernel<<<blocks_for(longest, max_ctas), kPeerThreads, 0, stream>>>(params);
  });
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_pace_begin(std::uint64_t* begin_ns, cudaStream_t stream) {
  pace_begin_kernel<<<1, 1, 0, stream>>>(begin_ns);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_pace_end(std::uint64_t* begin_ns, std::uint64_t duration_ns, cudaStream_t stream) {
  pace_end_kernel<<<1, 1, 0, stream>>>(begin_ns, duration_ns);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_peer_kernels() {
  cudaFuncAttributes attributes;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    with_element(dtype, [&](auto element) {
      using Element = decltype(element);
      for (const bool aligned : {false, true}) {
        for (int ranks = 1; ranks <= kMaxPeerRanks; ++ranks)
          FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reduce_kernel<Element>(aligned, ranks)));
      }
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, peer_copy_kernel<Element, true>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, peer_copy_kernel<Element, false>));
    });
  }
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, pace_begin_kernel));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, pace_end_kernel));
}

}  // namespace flashoverlap::cuda
