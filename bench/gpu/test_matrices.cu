#include "test_matrices.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bench_check.h"

namespace bench {
namespace {

__device__ inline std::uint32_t hash32(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return static_cast<std::uint32_t>(x);
}

__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
__device__ inline void from_float(__nv_bfloat16& to, float x) {
  to = __float2bfloat16_rn(x);
}
__device__ inline void from_float(__half& to, float x) {
  to = __float2half_rn(x);
}

// Uniform in [-1, 1).
template <class Element>
__global__ void fill_random_kernel(Element* data, std::int64_t count, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    from_float(data[i],
               static_cast<float>(hash32(seed * 0x9E3779B97F4A7C15ULL + i)) * (2.0F / 4294967296.0F) - 1.0F);
  }
}

// One warp per sample.
template <class Element>
__global__ void check_samples_kernel(const Element* a, std::int64_t lda, const Element* b, std::int64_t ldb,
                                     int m, int n, int k, const Element* d, std::int64_t ldd,
                                     std::uint64_t seed, double relative_bound, double absolute_bound,
                                     unsigned* errors) {
  const int sample = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = threadIdx.x % 32;
  const int row = static_cast<int>(hash32(seed + 2ULL * sample) % static_cast<unsigned>(m));
  const int col = static_cast<int>(hash32(seed + 2ULL * sample + 1) % static_cast<unsigned>(n));
  double sum = 0;
  for (int i = lane; i < k; i += 32) {
    sum += static_cast<double>(to_float(a[row * lda + i])) * static_cast<double>(to_float(b[col * ldb + i]));
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, step);
  if (lane == 0) {
    const double got = to_float(d[row * ldd + col]);
    // Written so that a NaN is an error.
    if (!(fabs(got - sum) <= relative_bound * fabs(sum) + absolute_bound)) atomicAdd(errors, 1U);
  }
}

template <class Element>
__global__ void count_differences_kernel(const Element* x, const Element* y, std::int64_t count,
                                         float relative_bound, float absolute_bound, unsigned* errors) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const float difference = fabsf(to_float(x[i]) - to_float(y[i]));
    if (!(difference <= relative_bound * fabsf(to_float(y[i])) + absolute_bound)) atomicAdd(errors, 1U);
  }
}

// One block per tile.
__global__ void unpack_tiles_kernel(const PackedTile* tiles, const std::uint16_t* packed, std::uint16_t* d,
                                    std::int64_t ldd) {
  const PackedTile tile = tiles[blockIdx.x];
  for (int i = threadIdx.x; i < tile.rows * tile.cols; i += blockDim.x) {
    d[(tile.row + i / tile.cols) * ldd + tile.col + i % tile.cols] = packed[tile.offset + i];
  }
}

constexpr int kBlocks = 1024;
constexpr int kThreads = 256;

}  // namespace

void fill_random(Element16 type, void* data, std::int64_t count, std::uint64_t seed, cudaStream_t stream) {
  if (type == Element16::kBf16) {
    fill_random_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(data), count, seed);
  } else {
    fill_random_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<__half*>(data), count, seed);
  }
  BENCH_CUDA(cudaGetLastError());
}

void check_samples(Element16 type, const void* a, const void* b, int m, int n, int k, const void* d,
                   double relative_bound, double absolute_bound, unsigned* errors, cudaStream_t stream) {
  constexpr int kSampleBlocks = 4096 / (kThreads / 32);
  constexpr std::uint64_t kSeed = 77;
  const auto run = [&](auto tag) {
    using Element = decltype(tag);
    check_samples_kernel<<<kSampleBlocks, kThreads, 0, stream>>>(
        static_cast<const Element*>(a), k, static_cast<const Element*>(b), k, m, n, k,
        static_cast<const Element*>(d), n, kSeed, relative_bound, absolute_bound, errors);
  };
  type == Element16::kBf16 ? run(__nv_bfloat16{}) : run(__half{});
  BENCH_CUDA(cudaGetLastError());
}

void count_differences(Element16 type, const void* x, const void* y, std::int64_t count, float relative_bound,
                       float absolute_bound, unsigned* errors, cudaStream_t stream) {
  const auto run = [&](auto tag) {
    using Element = decltype(tag);
    count_differences_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<const Element*>(x),
                                                               static_cast<const Element*>(y), count,
                                                               relative_bound, absolute_bound, errors);
  };
  type == Element16::kBf16 ? run(__nv_bfloat16{}) : run(__half{});
  BENCH_CUDA(cudaGetLastError());
}

void unpack_tiles(const PackedTile* tiles, int num_tiles, const void* packed, void* d, std::int64_t ldd,
                  cudaStream_t stream) {
  unpack_tiles_kernel<<<num_tiles, kThreads, 0, stream>>>(tiles, static_cast<const std::uint16_t*>(packed),
                                                          static_cast<std::uint16_t*>(d), ldd);
  BENCH_CUDA(cudaGetLastError());
}

}  // namespace bench
