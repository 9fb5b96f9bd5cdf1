// Operands whose products are exact, and their product by the simplest kernel there is.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "check.h"
#include "device.h"
#include "signal_gemm.h"

namespace flashoverlap::gpu_test {

/// 16-bit elements that are integers from -2 to 2. Sums of fewer than 2^21 products are exact in float32 in
/// any order, so two kernels that both round once agree bit for bit.
std::vector<std::uint16_t> small_integers(cuda::GemmType type, std::int64_t count, std::uint64_t seed);

/// d[i, j] = round(sum over x of a[i, x] * b[j, x]); all row-major on the current device.
void reference_gemm(cuda::GemmType type, const void* a, std::int64_t lda, const void* b, std::int64_t ldb,
                    int m, int n, int k, void* d, std::int64_t ldd, cudaStream_t stream);

/// Adds to *differences the number of 16-bit elements in which x and y differ.
void count_differences(const void* x, const void* y, std::int64_t count, unsigned* differences,
                       cudaStream_t stream);

/// A device buffer with a copy of `host`.
template <class T>
cuda::DeviceBuffer device_copy(const std::vector<T>& host) {
  const auto bytes = static_cast<std::int64_t>(host.size() * sizeof(T));
  cuda::DeviceBuffer buffer(0, bytes, "test data");
  cuda::upload(0, buffer.data(), host.data(), static_cast<std::size_t>(bytes));
  return buffer;
}

template <class T>
std::vector<T> host_copy(const cuda::DeviceBuffer& buffer) {
  std::vector<T> host(static_cast<std::size_t>(buffer.bytes()) / sizeof(T));
  FLASHOVERLAP_CUDA_CHECK(cudaMemcpy(host.data(), buffer.data(), static_cast<std::size_t>(buffer.bytes()),
                                     cudaMemcpyDeviceToHost));
  return host;
}

constexpr std::uint16_t kPoison = 0xffff;  // NaN in bf16 and in fp16

}  // namespace flashoverlap::gpu_test
