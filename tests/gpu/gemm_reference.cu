#include "gemm_reference.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flashoverlap::gpu_test {
namespace {

__device__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ float to_float(__half x) {
  return __half2float(x);
}
__device__ void round_to(__nv_bfloat16& to, float x) {
  to = __float2bfloat16_rn(x);
}
__device__ void round_to(__half& to, float x) {
  to = __float2half_rn(x);
}

template <class Element>
__global__ void reference_kernel(const Element* a, std::int64_t lda, const Element* b, std::int64_t ldb,
                                 int m, int n, int k, Element* d, std::int64_t ldd) {
  const int row = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y);
  const int col = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= m || col >= n) return;
  float sum = 0;
  for (int x = 0; x < k; ++x) sum += to_float(a[row * lda + x]) * to_float(b[col * ldb + x]);
  round_to(d[row * ldd + col], sum);
}

__global__ void count_differences_kernel(const std::uint16_t* x, const std::uint16_t* y, std::int64_t count,
                                         unsigned* differences) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    if (x[i] != y[i]) atomicAdd(differences, 1U);
  }
}

}  // namespace

std::vector<std::uint16_t> small_integers(cuda::GemmType type, std::int64_t count, std::uint64_t seed) {
  // -2, -1, 0, 1, 2
  constexpr std::uint16_t kBf16[] = {0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000};
  constexpr std::uint16_t kFp16[] = {0xc000, 0xbc00, 0x0000, 0x3c00, 0x4000};
  const auto& values = type == cuda::GemmType::kBf16 ? kBf16 : kFp16;
  std::vector<std::uint16_t> data(static_cast<std::size_t>(count));
  std::uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 1;
  for (std::uint16_t& element : data) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    element = values[(state >> 33) % 5];
  }
  return data;
}

void reference_gemm(cuda::GemmType type, const void* a, std::int64_t lda, const void* b, std::int64_t ldb,
                    int m, int n, int k, void* d, std::int64_t ldd, cudaStream_t stream) {
  const dim3 threads(32, 8);
  const dim3 blocks((static_cast<unsigned>(n) + 31) / 32, (static_cast<unsigned>(m) + 7) / 8);
  if (type == cuda::GemmType::kBf16) {
    reference_kernel<<<blocks, threads, 0, stream>>>(static_cast<const __nv_bfloat16*>(a), lda,
                                                     static_cast<const __nv_bfloat16*>(b), ldb, m, n, k,
                                                     static_cast<__nv_bfloat16*>(d), ldd);
  } else {
    reference_kernel<<<blocks, threads, 0, stream>>>(static_cast<const __half*>(a), lda,
                                                     static_cast<const __half*>(b), ldb, m, n, k,
                                                     static_cast<__half*>(d), ldd);
  }
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void count_differences(const void* x, const void* y, std::int64_t count, unsigned* differences,
                       cudaStream_t stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(count / 1024 + 1 < 512 ? count / 1024 + 1 : 512);
  count_differences_kernel<<<blocks, 256, 0, stream>>>(
      static_cast<const std::uint16_t*>(x), static_cast<const std::uint16_t*>(y), count, differences);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flashoverlap::gpu_test
