#include "restore.h"

#include <algorithm>
#include <span>
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
  int ring_bytes = 0;  // of shared memory for each source, and as much for a residual
};

template <class Element, bool kNorm, bool kSums, int kVectors, int kRowsAhead>
Launch aligned_launch(std::int64_t vectors, int threads_at_most) {
  using Rows = AlignedRows<Element, kNorm, kSums, kVectors, kRowsAhead>;
  const auto wanted =
      static_cast<int>(std::min<std::int64_t>((vectors + kVectors - 1) / kVectors, threads_at_most));
  const int threads = (wanted + kWarp - 1) / kWarp * kWarp;
  return {.kernel = restore_aligned<Element, kNorm, kSums, kVectors, kRowsAhead>,
          .threads = threads,
          .cols = threads * kVectors * kVectorElements,
          .ring_bytes = threads * kVectors * Rows::kRowSlots * static_cast<int>(sizeof(uint4))};
}

template <class Element>
Launch any_launch(bool is_norm) {
  return {is_norm ? restore_any<Element, true> : restore_any<Element, false>};
}

template <class Element, bool kSums, int kRowsAhead>
Launch choose_aligned(bool is_norm, std::int64_t n) {
  constexpr std::int64_t kShortRow = 256;  // vectors
  const std::int64_t vectors = (n + kVectorElements - 1) / kVectorElements;
  if (!is_norm) return aligned_launch<Element, false, kSums, 2, kRowsAhead>(vectors, kAnyThreads);
  if (vectors <= kShortRow) return aligned_launch<Element, true, kSums, 1, kRowsAhead>(vectors, kMaxThreads);
  if (vectors <= 2 * kMaxThreads)
    return aligned_launch<Element, true, kSums, 2, kRowsAhead>(vectors, kMaxThreads);
  return any_launch<Element>(is_norm);
}

constexpr int kAhead = 2;  // rows

// From the quickest to the one that always works: `choice` 0, 1, …, kChoices - 1. Many sources and long rows
// leave no shared memory for rows ahead, or none at all.
constexpr int kChoices = 3;

template <class Element>
Launch choose_kernel(bool is_norm, bool is_sum, int choice, std::int64_t n) {
  switch (choice) {
    case 0:
      return is_sum ? choose_aligned<Element, true, kAhead>(is_norm, n)
                    : choose_aligned<Element, false, kAhead>(is_norm, n);
    case 1:
      if (is_sum) return choose_aligned<Element, true, 0>(is_norm, n);
      [[fallthrough]];
    default:
      return any_launch<Element>(is_norm);
  }
}

Launch choose_kernel(DType dtype, bool is_norm, bool is_sum, int choice, std::int64_t n) {
  return dtype == DType::kBFloat16 ? choose_kernel<__nv_bfloat16>(is_norm, is_sum, choice, n)
                                   : choose_kernel<__half>(is_norm, is_sum, choice, n);
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaGetDevice(&device));
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

bool is_aligned_pointer(const void* pointer, std::int64_t ld) {
  return pointer == nullptr ||
         (reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0 && ld % kVectorElements == 0);
}

// Blocks that the current device holds at once.
std::int64_t resident_blocks(const Launch& launch, int shared_bytes) {
  int blocks = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, launch.kernel, launch.threads, static_cast<std::size_t>(shared_bytes)));
  return static_cast<std::int64_t>(device_attribute(cudaDevAttrMultiProcessorCount)) * std::max(1, blocks);
}

bool are_sources_aligned(const RestoreParams& params, std::int64_t ld) {
  const std::span sources(params.sums.sources, static_cast<std::size_t>(params.sums.count));
  return is_aligned_pointer(params.source, ld) &&
         std::all_of(sources.begin(), sources.end(),
                     [&](const void* source) { return is_aligned_pointer(source, ld); });
}

bool is_aligned(const RestoreParams& params) {
  const Epilogue& e = params.epilogue;
  const bool is_row_major = params.restore.rows == nullptr;
  return params.n % kVectorElements == 0 && (is_row_major || params.restore.is_aligned) &&
         are_sources_aligned(params, is_row_major ? params.source_ld : 0) &&
         is_aligned_pointer(params.out, params.ldo) && is_aligned_pointer(e.bias, 0) &&
         is_aligned_pointer(e.residual, e.residual_ld) &&
         is_aligned_pointer(e.residual_out, e.residual_out_ld) && is_aligned_pointer(e.rms_norm_weight, 0);
}

void check_params(const RestoreParams& params) {
  if (params.dtype == DType::kFloat32)
    throw Error(ErrorKind::kUnsupported, "restore on CUDA: bf16 or f16, not f32");
  if (params.source == nullptr || params.out == nullptr)
    throw_bad_argument("restore: source and out must not be null");
  if (params.sums.count < 0 || params.sums.count > PartialSums::kMost) {
    throw_bad_argument("restore: %d partial sums, must be 0 to %d", params.sums.count, PartialSums::kMost);
  }
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
  const int rings = std::max(1, params.sums.count) + (params.epilogue.residual != nullptr ? 1 : 0);
  constexpr int kStaticBytes = 1024;  // at least what a kernel has of its own
  const int most_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticBytes;
  Launch launch;
  for (int choice = is_aligned(params) ? 0 : kChoices - 1; choice < kChoices; ++choice) {
    launch = choose_kernel(params.dtype, is_norm, params.sums.count > 0, choice, params.n);
    if (launch.ring_bytes * rings <= most_bytes) break;
  }
  const int shared_bytes = launch.ring_bytes * rings;
  if (launch.ring_bytes == 0) {
    launch.kernel<<<static_cast<unsigned>(params.rows), launch.threads, 0, stream>>>(params);
  } else {
    // Not shared_bytes: between this and the launch another thread may set what its own call needs.
    FLASHOVERLAP_CUDA_CHECK(
        cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes));
    const std::int64_t stretches = (params.n + launch.cols - 1) / launch.cols;
    const std::int64_t at_once = std::max<std::int64_t>(1, resident_blocks(launch, shared_bytes) / stretches);
    const dim3 grid(static_cast<unsigned>(std::min(params.rows, at_once)), static_cast<unsigned>(stretches));
    launch.kernel<<<grid, launch.threads, shared_bytes, stream>>>(params);
  }
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_restore_kernels() {
  cudaFuncAttributes attributes;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const bool is_norm : {false, true}) {
      for (const bool is_sum : {false, true}) {
        for (int choice = 0; choice < kChoices; ++choice) {
          for (const std::int64_t n : {8, 8192, 65536}) {
            FLASHOVERLAP_CUDA_CHECK(
                cudaFuncGetAttributes(&attributes, choose_kernel(dtype, is_norm, is_sum, choice, n).kernel));
          }
        }
      }
    }
  }
}

}  // namespace flashoverlap::cuda
