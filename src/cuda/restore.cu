#include "restore.h"

#include <algorithm>
#include <string>

#include "check.h"
#include "flashoverlap/error.h"
#include "restore_kernel.cuh"

namespace flashoverlap::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kAnyThreads = 256;

using Kernel = void (*)(RestoreParams);

struct Launch {
  Kernel kernel = nullptr;
  int threads = kAnyThreads;
  int cols = 0;        // that a block covers; 0: all, and then a block has one row
  int ring_bytes = 0;  // of shared memory for the source; as much again for a residual
};

template <class Element, bool kNorm, int kVectors>
Launch aligned_launch(std::int64_t vectors, int threads_at_most) {
  const auto wanted =
      static_cast<int>(std::min<std::int64_t>((vectors + kVectors - 1) / kVectors, threads_at_most));
  const int threads = (wanted + kWarp - 1) / kWarp * kWarp;
  return {.kernel = restore_aligned<Element, kNorm, kVectors>,
          .threads = threads,
          .cols = threads * kVectors * kVectorElements,
          .ring_bytes = threads * kVectors * kRowSlots * static_cast<int>(sizeof(uint4))};
}

template <class Element>
Launch choose_kernel(bool is_norm, bool is_aligned, std::int64_t n) {
  constexpr std::int64_t kShortRow = 256;  // vectors
  const std::int64_t vectors = (n + kVectorElements - 1) / kVectorElements;
  if (is_aligned && !is_norm) return aligned_launch<Element, false, 2>(vectors, kAnyThreads);
  if (is_aligned && vectors <= kShortRow) return aligned_launch<Element, true, 1>(vectors, kMaxThreads);
  if (is_aligned && vectors <= 2 * kMaxThreads) return aligned_launch<Element, true, 2>(vectors, kMaxThreads);
  return {is_norm ? restore_any<Element, true> : restore_any<Element, false>};
}

bool is_aligned_pointer(const void* pointer, std::int64_t ld) {
  return pointer == nullptr ||
         (reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0 && ld % kVectorElements == 0);
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaGetDevice(&device));
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Blocks that the current device holds at once.
std::int64_t resident_blocks(const Launch& launch, int shared_bytes) {
  int blocks = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, launch.kernel, launch.threads, static_cast<std::size_t>(shared_bytes)));
  return static_cast<std::int64_t>(device_attribute(cudaDevAttrMultiProcessorCount)) * std::max(1, blocks);
}

bool is_aligned(const RestoreParams& params) {
  const Epilogue& e = params.epilogue;
  const bool is_row_major = params.restore.rows == nullptr;
  return params.n % kVectorElements == 0 && (is_row_major || params.restore.is_aligned) &&
         is_aligned_pointer(params.source, is_row_major ? params.source_ld : 0) &&
         is_aligned_pointer(params.out, params.ldo) && is_aligned_pointer(e.bias, 0) &&
         is_aligned_pointer(e.residual, e.residual_ld) &&
         is_aligned_pointer(e.residual_out, e.residual_out_ld) && is_aligned_pointer(e.rms_norm_weight, 0);
}

void check_params(const RestoreParams& params) {
  if (params.dtype == DType::kFloat32)
    throw Error(ErrorKind::kUnsupported, "restore on CUDA: bf16 or f16, not f32");
  if (params.source == nullptr || params.out == nullptr)
    throw_bad_argument("restore: source and out must not be null");
  if (params.ldo < params.n) {
    throw_bad_argument("restore: ldo %lld is less than n %lld", static_cast<long long>(params.ldo),
                       static_cast<long long>(params.n));
  }
  if (params.n > INT32_MAX || params.rows > INT32_MAX) {
    throw_bad_argument("restore: %lld rows of %lld columns exceed 2^31 - 1",
                       static_cast<long long>(params.rows), static_cast<long long>(params.n));
  }
}

}  // namespace

void launch_restore(const RestoreParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.n == 0) return;
  check_params(params);
  const bool is_norm = params.epilogue.rms_norm_weight != nullptr;
  const auto choose = [&](bool aligned) {
    return params.dtype == DType::kBFloat16 ? choose_kernel<__nv_bfloat16>(is_norm, aligned, params.n)
                                            : choose_kernel<__half>(is_norm, aligned, params.n);
  };
  Launch launch = choose(is_aligned(params));
  const int shared_bytes = launch.ring_bytes * (params.epilogue.residual != nullptr ? 2 : 1);
  // Long rows on devices with little shared memory.
  if (shared_bytes > device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) launch = choose(false);
  if (launch.ring_bytes == 0) {
    launch.kernel<<<static_cast<unsigned>(params.rows), launch.threads, 0, stream>>>(params);
  } else {
    FLASHOVERLAP_CUDA_CHECK(
        cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    const std::int64_t stretches = (params.n + launch.cols - 1) / launch.cols;
    const std::int64_t at_once = std::max<std::int64_t>(1, resident_blocks(launch, shared_bytes) / stretches);
    const dim3 grid(static_cast<unsigned>(std::min(params.rows, at_once)), static_cast<unsigned>(stretches));
    launch.kernel<<<grid, launch.threads, shared_bytes, stream>>>(params);
  }
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_restore_kernels() {
  cudaFuncAttributes attributes;
  for (const bool is_norm : {false, true}) {
    for (const bool is_aligned : {false, true}) {
      for (const std::int64_t n : {8, 8192, 65536}) {
        FLASHOVERLAP_CUDA_CHECK(
            cudaFuncGetAttributes(&attributes, choose_kernel<__nv_bfloat16>(is_norm, is_aligned, n).kernel));
        FLASHOVERLAP_CUDA_CHECK(
            cudaFuncGetAttributes(&attributes, choose_kernel<__half>(is_norm, is_aligned, n).kernel));
      }
    }
  }
}

}  // namespace flashoverlap::cuda
