// What the kernels of src/cuda read instead of an OverlapPlan: flat tables in device memory, made from a plan
// by DevicePlan (device_plan.h).
//
// A *plan tile* is what one cluster computes. A cluster of two blocks with 128 x 256 accumulators each
// therefore has plan tiles of 256 x 256, its schedule is a schedule of plan tiles, and no plan ever needs to
// know that blocks come in pairs.
#pragma once

#include <cstdint>

namespace flashoverlap::cuda {

/// Where the rows of a tile go.
enum class StoreKind : std::uint32_t {
  kInPlace = 0,  ///< D, row-major: element (i, j) of D at i * ldd + j; the tile begins `payload` rows further
                 ///< down in D than in A
  kDense = 1,    ///< the packed buffer: element (i, j) of the tile at payload + i * cols + j
  kWhole = 2,    ///< as kDense, with cols = the variant's tile_cols and the tile at payload * tile_cols
  kSlabs = 3,    ///< the packed buffer, in slabs of `slab_rows` rows: slab s at slab_rows_of[payload + s] *
                 ///< tile_cols
  kRows = 4,     ///< the packed buffer: row i of the tile at row_offsets[payload + i]
};

/// One position of the schedule. D is the output of this rank, which may hold only a part of the product. 32
/// bytes, read as two 16-byte vectors.
struct alignas(16) TileWork {
  std::int32_t row_begin = 0;   ///< first row of A
  std::int32_t col_begin = 0;   ///< first column of D
  std::int32_t weight_row = 0;  ///< first row of B: col_begin, or beyond it in a stack of weights
  std::int16_t rows = 0;  ///< >= 1, at most the variant's tile_rows; what lies beyond is computed and dropped
  std::int16_t cols = 0;
  std::int32_t group = -1;  ///< counter to add to when stored; -1: none
  StoreKind kind = StoreKind::kInPlace;
  std::int64_t payload = 0;  ///< see StoreKind
};
static_assert(sizeof(TileWork) == 32);

/// Pointers to the tables of one plan on the device. All of them outlive every launch that uses them.
struct DeviceTables {
  const TileWork* schedule = nullptr;          ///< [num_positions], 16-byte aligned
  std::int32_t num_positions = 0;              ///< tiles of the grid
  const std::int64_t* row_offsets = nullptr;   ///< kRows: element offset in the packed buffer; -1: not stored
  const std::int32_t* slab_rows_of = nullptr;  ///< kSlabs: offset of a slab in the packed buffer / tile_cols
  std::int32_t slab_rows = 0;  ///< kSlabs: rows of a slab, a power of two from 8 to 64; 0: no slabs
};

}  // namespace flashoverlap::cuda
