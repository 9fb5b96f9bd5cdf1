#include "tensor_map.h"

#include "check.h"
#include "driver.h"

namespace flashoverlap::cuda {

CUtensorMap make_store_map(void* base, std::int64_t rows, std::int64_t cols, std::int64_t ld, int box_rows) {
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  constexpr int kBoxCols = 64;
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride_bytes[1] = {static_cast<cuuint64_t>(ld) * 2};
  const cuuint32_t box[2] = {kBoxCols, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[2] = {1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, base, sizes, stride_bytes, box,
                                 element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw_bad_argument(
        "tensor map refused (CUresult %d): base %p, %lld x %lld elements of 16 bits, ld %lld, box %d x %d",
        static_cast<int>(result), base, static_cast<long long>(rows), static_cast<long long>(cols),
        static_cast<long long>(ld), box_rows, kBoxCols);
  }
  return map;
}

}  // namespace flashoverlap::cuda
