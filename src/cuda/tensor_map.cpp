#include "tensor_map.h"

#include <cuda_runtime_api.h>

#include "check.h"

namespace flashoverlap::cuda {
namespace {

// Through the runtime, so that nothing links against the driver library and machines without one can load us.
auto encode_function() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found{};
    FLASHOVERLAP_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) throw_bad_argument("this CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(pointer);
  }();
  return function;
}

}  // namespace

CUtensorMap make_store_map(void* base, std::int64_t rows, std::int64_t cols, std::int64_t ld, int box_rows) {
  constexpr int kBoxCols = 64;
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride_bytes[1] = {static_cast<cuuint64_t>(ld) * 2};
  const cuuint32_t box[2] = {kBoxCols, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[2] = {1, 1};
  const CUresult result = encode_function()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, base, sizes, stride_bytes, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw_bad_argument("cuTensorMapEncodeTiled failed (CUresult %d): base %p, %lld x %lld elements of 16 bits, ld %lld, box %d x %d",
                       static_cast<int>(result), base, static_cast<long long>(rows), static_cast<long long>(cols),
                       static_cast<long long>(ld), box_rows, kBoxCols);
  }
  return map;
}

}  // namespace flashoverlap::cuda
