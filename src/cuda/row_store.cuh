// Rows of a finished tile to global memory by ordinary stores, wherever placement says: the general path of
// all kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tile_work.h"

namespace flashoverlap::cuda {

// Where output goes; constant over the launch.
struct OutputParams {
  std::uint16_t* packed;
  std::uint16_t* output;  // D
  std::int64_t ldd;
  std::int32_t rows;  // of D
  std::int32_t cols;
  const std::int64_t* row_offsets;
  const std::int32_t* slab_rows_of;
  std::int32_t slab_rows;
};

// Two float32 values rounded to nearest even, the first in the lower half.
template <bool kIsBf16>
__device__ __forceinline__ std::uint32_t pack2(float low, float high) {
  if constexpr (kIsBf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

// Stores the first `cols` (at most 8) elements of a 16-byte vector, with accesses as wide as the address
// allows.
__device__ __forceinline__ void store_vector(std::uint16_t* to, const uint4& vector, int cols) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  if (cols >= 8 && (address & 15) == 0) {
    *reinterpret_cast<uint4*>(to) = vector;
    return;
  }
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  if (cols >= 8 && (address & 3) == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<std::uint32_t*>(to)[i] = words[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < cols) to[i] = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i & 1)));
  }
}

// The first row in D of a tile that is stored in place.
__device__ __forceinline__ std::int32_t row_in_output(const TileWork& work) {
  return work.row_begin + static_cast<std::int32_t>(work.payload);
}

// Address of one row of a tile, at the tile's first column; null where the row is not stored.
template <int kTileCols>
__device__ __forceinline__ std::uint16_t* row_address(const OutputParams& params, const TileWork& work,
                                                      int row) {
  switch (work.kind) {
    case StoreKind::kInPlace:
      return params.output + (row_in_output(work) + row) * params.ldd + work.col_begin;
    case StoreKind::kDense:
      return params.packed + work.payload + static_cast<std::int64_t>(row) * work.cols;
    case StoreKind::kWhole:
      return params.packed + (work.payload + row) * kTileCols;
    case StoreKind::kSlabs: {
      const std::int64_t slab = __ldg(params.slab_rows_of + work.payload + row / params.slab_rows);
      return params.packed + (slab + row % params.slab_rows) * kTileCols;
    }
    default: {
      const std::int64_t offset = __ldg(params.row_offsets + work.payload + row);
      return offset < 0 ? nullptr : params.packed + offset;
    }
  }
}

}  // namespace flashoverlap::cuda
