#include "restore.h"

#include "check.h"
#include "flashoverlap/error.h"
#include "restore_kernel.cuh"

namespace flashoverlap::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kPlainThreads = 256;
constexpr int kWarp = 32;

using Kernel = void (*)(RestoreParams);

struct Launch {
  Kernel kernel = nullptr;
  int vectors = 1;  // a thread's, of 8 elements
  int threads = kPlainThreads;
};

template <class Element>
Launch choose_kernel(bool is_norm, bool is_aligned, std::int64_t n) {
  const std::int64_t vectors = (n + kVectorElements - 1) / kVectorElements;
  if (!is_norm) {
    if (!is_aligned) return {restore_kernel<Element, false, false, 1>, 1, kPlainThreads};
    if (vectors <= kPlainThreads) return {restore_kernel<Element, false, true, 1>, 1, kPlainThreads};
    return {restore_kernel<Element, false, true, 4>, 4, kPlainThreads};
  }
  // Four vectors in flight hide latency; short rows take more threads instead. A thread has at most 4: registers.
  constexpr std::int64_t kShortRow = 128;
  const int per_thread = vectors <= kShortRow ? 1 : 4;
  const auto threads = static_cast<int>((vectors + per_thread - 1) / per_thread + kWarp - 1) / kWarp * kWarp;
  if (per_thread == 1) {
    return {is_aligned ? restore_kernel<Element, true, true, 1> : restore_kernel<Element, true, false, 1>, 1, threads};
  }
  return {is_aligned ? restore_kernel<Element, true, true, 4> : restore_kernel<Element, true, false, 4>, 4, threads};
}

bool is_aligned_pointer(const void* pointer, std::int64_t ld) {
  return pointer == nullptr || (reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0 && ld % kVectorElements == 0);
}

bool is_aligned(const RestoreParams& params) {
  const Epilogue& e = params.epilogue;
  const bool is_row_major = params.restore.band_of_row == nullptr;
  return params.n % kVectorElements == 0 && (is_row_major || params.restore.is_aligned) &&
         is_aligned_pointer(params.source, is_row_major ? params.source_ld : 0) && is_aligned_pointer(params.out, params.ldo) &&
         is_aligned_pointer(e.bias, 0) && is_aligned_pointer(e.residual, e.residual_ld) &&
         is_aligned_pointer(e.residual_out, e.residual_out_ld) && is_aligned_pointer(e.rms_norm_weight, 0);
}

void check_params(const RestoreParams& params) {
  if (params.dtype == DType::kFloat32) throw Error(ErrorKind::kUnsupported, "restore on CUDA: bf16 or f16, not f32");
  if (params.source == nullptr || params.out == nullptr) throw_bad_argument("restore: source and out must not be null");
  if (params.ldo < params.n) {
    throw_bad_argument("restore: ldo %lld is less than n %lld", static_cast<long long>(params.ldo), static_cast<long long>(params.n));
  }
  if (params.n > INT32_MAX || params.rows > INT32_MAX) {
    throw_bad_argument("restore: %lld rows of %lld columns exceed 2^31 - 1", static_cast<long long>(params.rows),
                       static_cast<long long>(params.n));
  }
  if (params.epilogue.rms_norm_weight != nullptr && params.n > kMaxNormCols) {
    throw Error(ErrorKind::kUnsupported, "restore on CUDA: RMSNorm over " + std::to_string(params.n) + " columns; at most " +
                                             std::to_string(kMaxNormCols));
  }
}

}  // namespace

void launch_restore(const RestoreParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.n == 0) return;
  check_params(params);
  const bool is_norm = params.epilogue.rms_norm_weight != nullptr;
  const Launch launch = params.dtype == DType::kBFloat16 ? choose_kernel<__nv_bfloat16>(is_norm, is_aligned(params), params.n)
                                                         : choose_kernel<__half>(is_norm, is_aligned(params), params.n);
  const std::int64_t block_cols = static_cast<std::int64_t>(launch.threads) * launch.vectors * kVectorElements;
  const dim3 grid(static_cast<unsigned>(params.rows), static_cast<unsigned>((params.n + block_cols - 1) / block_cols));
  launch.kernel<<<grid, launch.threads, 0, stream>>>(params);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_restore_kernels() {
  cudaFuncAttributes attributes;
  for (const bool is_norm : {false, true}) {
    for (const bool is_aligned : {false, true}) {
      for (const std::int64_t n : {std::int64_t{8}, kMaxNormCols}) {
        FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, choose_kernel<__nv_bfloat16>(is_norm, is_aligned, n).kernel));
        FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, choose_kernel<__half>(is_norm, is_aligned, n).kernel));
      }
    }
  }
}

}  // namespace flashoverlap::cuda
