// What the kernels of src/cuda read instead of an OverlapPlan: flat tables in device memory, made from a plan by
// DevicePlan (device_plan.h).
//
// A *plan tile* is what one cluster computes. A cluster of two blocks with 128 x 256 accumulators each therefore has plan
// tiles of 256 x 256, its schedule is a schedule of plan tiles, and no plan ever needs to know that blocks come in pairs.
#pragma once

#include <cstdint>

namespace flashoverlap::cuda {

/// Where the rows of a tile go.
enum class StoreKind : std::uint32_t {
  kInPlace = 0,  ///< D, row-major: element (i, j) at i * ldd + j
  kWhole = 1,    ///< the packed buffer, dense, full tile width: `payload` = offset / tile width
  kSlabs = 2,    ///< the packed buffer in slabs of `slab_rows` rows: `payload` = index of the tile's first slab in slab_rows_of
  kRows = 3,     ///< row by row: `payload` = index of the tile's first row in row_offsets
};

/// One position of the schedule. 16 bytes, 16-byte aligned, so that a lane reads it in one load.
struct alignas(16) TileWork {
  std::int32_t tile_row = 0;  ///< the tile's rows start at tile_row * tile_rows
  std::int32_t tile_col = 0;  ///< its columns at tile_col * tile_cols
  std::int32_t group = -1;    ///< counter to add to when stored; -1: none
  std::uint32_t store = 0;    ///< StoreKind in the two highest bits, payload in the others
};
static_assert(sizeof(TileWork) == 16);

constexpr std::uint32_t kStorePayloadBits = 30;
constexpr std::uint32_t kStorePayloadMask = (1U << kStorePayloadBits) - 1;

constexpr std::uint32_t make_store(StoreKind kind, std::uint32_t payload) {
  return (static_cast<std::uint32_t>(kind) << kStorePayloadBits) | (payload & kStorePayloadMask);
}

#if defined(__CUDACC__)
#define FLASHOVERLAP_HOST_DEVICE __host__ __device__
#else
#define FLASHOVERLAP_HOST_DEVICE
#endif
FLASHOVERLAP_HOST_DEVICE constexpr StoreKind store_kind(std::uint32_t store) {
  return static_cast<StoreKind>(store >> kStorePayloadBits);
}
FLASHOVERLAP_HOST_DEVICE constexpr std::uint32_t store_payload(std::uint32_t store) { return store & kStorePayloadMask; }

/// Pointers to the tables of one plan on the device. All of them outlive every launch that uses them.
struct DeviceTables {
  const TileWork* schedule = nullptr;       ///< [num_positions], 16-byte aligned
  std::int32_t num_positions = 0;           ///< tiles of the grid
  const std::int64_t* row_offsets = nullptr;  ///< kRows: element offset in the packed buffer per row; -1: not stored
  const std::int32_t* slab_rows_of = nullptr;  ///< kSlabs: slab offset / tile width, per slab; -1: not stored
  std::int32_t slab_rows = 0;               ///< kSlabs: rows of a slab, a power of two from 8 to 64
};

}  // namespace flashoverlap::cuda
