// The way of a finished tile to global memory on sm_90a.
//
// A tile leaves the accumulators in *chunks* of 64 rows x 64 columns. A consumer warpgroup converts a chunk and writes it to
// one of its staging slots in shared memory (128-byte rows, 128-byte swizzle, as the copy engine wants it), then goes on; a
// *store warp* of the producer warpgroup, one per consumer warpgroup, takes the chunk from there to where placement says.
// So the tensor cores never wait for global memory, and neither does the signal: the store warp alone waits until the
// tile's stores are complete before it adds to the group's counter.
//
// Staging barriers, per slot (all within the block): `full`: the warpgroup's four warps arrive after fencing their shared
// stores, the store warp waits; `empty`: the store warp arrives when the slot has been read, the warpgroup waits. They start
// anew with every launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cstdint>
#include <type_traits>

#include "ptx.cuh"
#include "tile_work.h"

namespace flashoverlap::cuda::sm90 {

constexpr int kChunkRows = 64;
constexpr int kChunkCols = 64;
constexpr int kChunkBytes = kChunkRows * kChunkCols * 2;
constexpr int kWarpgroupWarps = 4;

template <int kSlots>
struct alignas(1024) StagingBuffer {
  std::uint8_t chunks[kSlots][kChunkBytes];
};

template <int kSlots>
struct StagingBarriers {
  std::uint64_t full[kSlots];
  std::uint64_t empty[kSlots];

  __device__ void init() {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(&full[slot], kWarpgroupWarps);
      ptx::mbarrier_init(&empty[slot], 1);
    }
  }
};

// Position in a ring of staging slots; both sides walk it in step.
template <int kSlots>
struct StagingState {
  int slot = 0;
  std::uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void wait_barrier(std::uint64_t* barrier, std::uint32_t phase) {
  while (!ptx::mbarrier_try_wait_acquire_cta(barrier, phase)) {
  }
}

// 128-byte swizzle: the 16-byte vector `vector` (0..7) of row `row` lies at vector ^ (row % 8).
__device__ __forceinline__ std::uint32_t swizzled_offset(int row, int vector) {
  return static_cast<std::uint32_t>(row * 128 + ((vector ^ (row & 7)) << 4));
}

// Two float32 values rounded to nearest even, the first in the lower half.
template <class Element>
__device__ __forceinline__ std::uint32_t pack2(float low, float high) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    static_assert(std::is_same_v<Element, cutlass::half_t>);
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

// Writes one chunk of the accumulators of a warpgroup. `acc` holds the 32 values that this thread has of the chunk, in the
// order of the m64nNk16 instruction: for each 8 columns two of row lane / 4, then two of eight rows below.
template <class Element, class Accumulator>
__device__ __forceinline__ void stage_chunk(std::uint8_t* chunk, const Accumulator& acc, int first, int warp_in_group, int lane) {
  const int row = warp_in_group * 16 + (lane & 15);
  CUTLASS_PRAGMA_UNROLL
  for (int pair = 0; pair < kChunkCols / 16; ++pair) {
    const int at = first + pair * 8;
    ptx::stmatrix_x4(chunk + swizzled_offset(row, pair * 2 + (lane >> 4)), pack2<Element>(acc(at), acc(at + 1)),
                     pack2<Element>(acc(at + 2), acc(at + 3)), pack2<Element>(acc(at + 4), acc(at + 5)),
                     pack2<Element>(acc(at + 6), acc(at + 7)));
  }
}

// Where a plan tile and this block's part of it lie.
struct TilePosition {
  std::int32_t row_in_tile;  // first row of the chunk within the plan tile
  std::int32_t col_in_tile;
  std::int32_t tile_first_row;  // of the plan tile in D
  std::int32_t tile_first_col;
};

// Everything a store warp needs to know about the output; constant over the launch.
struct StoreParams {
  const void* in_place_map;  // D, boxes of 64 x 64; null where D's stride or address is not a multiple of 16 bytes
  const void* whole_map;     // the packed buffer as rows of one tile width, boxes of 64 x 64
  const void* slab_map;      // the same, boxes of slab_rows x 64
  std::uint16_t* packed;
  std::uint16_t* output;
  std::int64_t ldd;
  std::int32_t m;
  std::int32_t n;
  const std::int64_t* row_offsets;
  const std::int32_t* slab_rows_of;
  std::int32_t slab_rows;
};

// Stores the first `cols` (at most 8) elements of a 16-byte vector, with accesses as wide as the address allows.
__device__ __forceinline__ void store_vector(std::uint16_t* to, const uint4& vector, int cols) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  if (cols >= 8 && (address & 15) == 0) {
    *reinterpret_cast<uint4*>(to) = vector;
  } else if (cols >= 8 && (address & 3) == 0) {
    auto* words = reinterpret_cast<std::uint32_t*>(to);
    words[0] = vector.x;
    words[1] = vector.y;
    words[2] = vector.z;
    words[3] = vector.w;
  } else {
    const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (i < cols) to[i] = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i & 1)));
    }
  }
}

// The general path: the warp copies the chunk row by row, eight lanes a row, to wherever each row belongs.
__device__ __forceinline__ void copy_chunk_rows(const StoreParams& params, const std::uint8_t* chunk, std::uint32_t store,
                                                const TilePosition& at, int lane) {
  const bool in_place = store_kind(store) == StoreKind::kInPlace;
  const int vector = lane & 7;
  const int col = at.col_in_tile + vector * 8;
  const int cols_left = params.n - (at.tile_first_col + col);
  if (cols_left <= 0) return;
  constexpr int kRowsPerStep = 4;
  #pragma unroll 2
  for (int step = 0; step < kChunkRows / kRowsPerStep; ++step) {
    const int row = step * kRowsPerStep + (lane >> 3);
    std::uint16_t* to = nullptr;
    if (in_place) {
      const int row_of_d = at.tile_first_row + at.row_in_tile + row;
      if (row_of_d < params.m) to = params.output + row_of_d * params.ldd + at.tile_first_col + col;
    } else {
      const std::int64_t offset = __ldg(params.row_offsets + store_payload(store) + at.row_in_tile + row);
      if (offset >= 0) to = params.packed + offset + col;
    }
    if (to != nullptr) {
      store_vector(to, *reinterpret_cast<const uint4*>(chunk + swizzled_offset(row, vector)), cols_left);
    }
  }
}

// Whether the copy engine can store this tile's chunks.
__device__ __forceinline__ bool is_bulk_store(const StoreParams& params, std::uint32_t store) {
  const StoreKind kind = store_kind(store);
  return kind == StoreKind::kWhole || kind == StoreKind::kSlabs ||
         (kind == StoreKind::kInPlace && params.in_place_map != nullptr);
}

// By one thread: starts the copy of one chunk and closes its bulk group.
__device__ __forceinline__ void bulk_store_chunk(const StoreParams& params, const std::uint8_t* chunk, std::uint32_t store,
                                                 const TilePosition& at) {
  const int payload = static_cast<int>(store_payload(store));
  switch (store_kind(store)) {
    case StoreKind::kInPlace:
      ptx::bulk_store_2d(params.in_place_map, chunk, at.tile_first_col + at.col_in_tile, at.tile_first_row + at.row_in_tile);
      break;
    case StoreKind::kWhole:
      ptx::bulk_store_2d(params.whole_map, chunk, at.col_in_tile, payload + at.row_in_tile);
      break;
    default:
      for (int row = 0; row < kChunkRows; row += params.slab_rows) {
        const int slab = payload + (at.row_in_tile + row) / params.slab_rows;
        const int to = __ldg(params.slab_rows_of + slab);
        if (to >= 0) ptx::bulk_store_2d(params.slab_map, chunk + row * 128, at.col_in_tile, to);
      }
  }
  ptx::bulk_commit_group();
}

// By one thread: this many of the thread's newest bulk groups may still be reading their slots.
template <int kSlots>
__device__ __forceinline__ void release_read_slots(StagingBarriers<kSlots>& barriers, StagingState<kSlots>& oldest) {
  ptx::mbarrier_arrive_release_cta(&barriers.empty[oldest.slot]);
  oldest.advance();
}

}  // namespace flashoverlap::cuda::sm90
