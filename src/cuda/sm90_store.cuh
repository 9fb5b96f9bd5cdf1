// The way of a finished tile to global memory on sm_90a.
//
// A tile leaves the accumulators in *chunks* of 64 rows x 64 columns. A consumer warpgroup converts a chunk
// and writes it to one of its staging slots in shared memory (128-byte rows, 128-byte swizzle, as the copy
// engine wants it), then goes on; a *store warp* of the producer warpgroup, one per consumer warpgroup, takes
// the chunk from there to where placement says. So the tensor cores never wait for global memory, and neither
// does the signal: the store warp alone waits until stores are complete before it adds to the group's
// counter.
//
// Staging barriers, per slot (all within the block), which count lanes: `full`: the warpgroup's four warps
// arrive after fencing their shared stores, the store warp waits; `empty`: the store warp arrives when the
// slot has been read, the warpgroup waits. Lanes that read or wrote the slot each by itself arrive each by
// itself; where one instruction did it for the warp, or the copy engine, one lane arrives for all. They start
// anew with every launch.
#pragma once

#include <cstdint>

#include "finish.cuh"
#include "ptx.cuh"
#include "row_store.cuh"
#include "tile_work.h"

namespace flashoverlap::cuda::sm90 {

constexpr int kChunkRows = 64;
constexpr int kChunkCols = 64;
constexpr int kChunkBytes = kChunkRows * kChunkCols * 2;
constexpr int kWarpgroupWarps = 4;
constexpr int kWarpLanes = 32;
constexpr int kWarpRows = kChunkRows / kWarpgroupWarps;
constexpr int kRowsPerStep = 4;  // that a warp copies or adds at a time, eight lanes a row

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
      ptx::mbarrier_init(&full[slot], kWarpgroupWarps * kWarpLanes);
      ptx::mbarrier_init(&empty[slot], kWarpLanes);
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

// Writes one chunk of the accumulators of a warpgroup. `acc` holds the 32 values that this thread has of the
// chunk, in the order of the m64nNk16 instruction: for each 8 columns two of row lane / 4, then two of eight
// rows below.
template <bool kIsBf16, class Accumulator>
__device__ __forceinline__ void stage_chunk(std::uint8_t* chunk, const Accumulator& acc, int first,
                                            int warp_in_group, int lane) {
  const int row = warp_in_group * 16 + (lane & 15);
#pragma unroll
  for (int pair = 0; pair < kChunkCols / 16; ++pair) {
    const int at = first + pair * 8;
    ptx::stmatrix_x4(chunk + swizzled_offset(row, pair * 2 + (lane >> 4)),
                     pack2<kIsBf16>(acc(at), acc(at + 1)), pack2<kIsBf16>(acc(at + 2), acc(at + 3)),
                     pack2<kIsBf16>(acc(at + 4), acc(at + 5)), pack2<kIsBf16>(acc(at + 6), acc(at + 7)));
  }
}

// A chunk's first row and column within its plan tile.
struct ChunkPosition {
  int row;
  int col;
};

// One lane's part of what a warp has of a chunk that becomes a sum: its rows, each with the ranks' parts in
// their order.
struct SumWalk {
  int row;
  int rank = 0;

  // Whether the row is complete.
  __device__ bool advance(int num_ranks) {
    if (++rank < num_ranks) return false;
    rank = 0;
    row += kRowsPerStep;
    return true;
  }
};

// A warp's part of a chunk, whose 16 rows it has staged itself: a lane has one column of vectors.
struct ChunkPart {
  std::uint8_t* chunk;
  ChunkPosition at;
  int vector;
  int first;  // row in the chunk
  int end;

  __device__ ChunkPart(const TileWork& work, const ChunkPosition& position, std::uint8_t* staged,
                       int warp_in_group, int lane)
      : chunk(staged),
        at(position),
        vector(lane & 7),
        first(warp_in_group * kWarpRows),
        end(min(first + kWarpRows, work.rows - position.row)) {
    if (col() >= work.cols) end = first;
    first += lane >> 3;
  }
  __device__ int col() const { return at.col + vector * 8; }
  __device__ int tile_row(int row) const { return at.row + row; }
  __device__ uint4* own(int row) const {
    return reinterpret_cast<uint4*>(chunk + swizzled_offset(row, vector));
  }
};

// Makes a warp's part of a chunk the sum over all ranks, where it lies. A warp has little to hide the way to
// memory behind but its own loads, so kAhead of them are on their way at a time. By the warps that multiply:
// with the store warp alone whole calls took 1.3 times as long (docs/gpu-cluster.md).
template <int kAhead, class Finish>
__device__ __forceinline__ void add_to_chunk(const TileWork& work, const ChunkPart& mine,
                                             const Finish& finish) {
  const bool are_vectors = finish.are_vectors(work);
  const auto load = [&](const SumWalk& walk) {
    if (finish.is_own(walk.rank)) return *mine.own(walk.row);
    const int row = mine.tile_row(walk.row);
    return are_vectors ? finish.part_vector(work, row, mine.col(), walk.rank)
                       : finish.part(work, row, mine.col(), walk.rank);
  };
  typename Finish::Sum sum;
  SumWalk added{mine.first};
  SumWalk loaded = added;
#pragma unroll 1
  while (added.row < mine.end) {
    uint4 parts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (loaded.row < mine.end) parts[i] = load(loaded);
      (void)loaded.advance(finish.num_ranks());
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int row = added.row;
      if (row >= mine.end) break;
      sum.add(parts[i]);
      if (added.advance(finish.num_ranks())) *mine.own(row) = sum.take();
    }
  }
}

// Rows of a chunk that a lane has.
constexpr int kLaneRows = kWarpRows / kRowsPerStep;

// What a lane adds to its part of a chunk besides the bias: kRows rows at a time.
template <int kRows>
struct ResidualRows {
  uint4 rows[kRows];
  template <class Finish>
  __device__ __forceinline__ void load(const TileWork& work, const ChunkPart& mine, int first,
                                       const Finish& finish) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i * kRowsPerStep;
      rows[i] = row < mine.end ? finish.residual(work, mine.tile_row(row), mine.col()) : uint4{};
    }
  }
};

// Applies the epilogue to a warp's part of a chunk, where it lies, kRows rows at a time; `residual` has the
// first of them. Inlined, like all that the warps run that multiply: around a call their products would wait
// for each other. Rows that are not there are made up and not stored.
template <int kRows, class Finish>
__device__ __forceinline__ void apply_to_chunk(const TileWork& work, const ChunkPart& mine, const uint4& bias,
                                               ResidualRows<kRows> residual, const Finish& finish) {
#pragma unroll 1
  for (int first = mine.first; first < mine.end; first += kRows * kRowsPerStep) {
    uint4 vectors[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) vectors[i] = *mine.own(first + i * kRowsPerStep);
    finish.complete(vectors, bias, residual.rows);
    if constexpr (kRows < kLaneRows) residual.load(work, mine, first + kRows * kRowsPerStep, finish);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i * kRowsPerStep;
      *mine.own(row) = vectors[i];
      if (row < mine.end) finish.store_residual_out(vectors[i], work, mine.tile_row(row), mine.col());
    }
    if constexpr (kRows == kLaneRows) break;
  }
}

// What a store warp needs to know about the output; constant over the launch.
struct StoreParams {
  OutputParams output;
  const void*
      in_place_map;  // D, boxes of 64 x 64; null where D's stride or address is not a multiple of 16 bytes
  const void* whole_map;  // the packed buffer as rows of tile_cols elements, boxes of 64 x 64
  const void* slab_map;   // the same, boxes of slab_rows x 64
};

// The general path: the warp copies the chunk row by row to wherever each row belongs.
template <int kTileCols>
__device__ __forceinline__ void copy_chunk_rows(const StoreParams& params, const TileWork& work,
                                                const ChunkPosition& at, const std::uint8_t* chunk,
                                                int lane) {
  const int vector = lane & 7;
  const int col = at.col + vector * 8;
  const int cols_left = work.cols - col;
  const int rows_left = min(kChunkRows, work.rows - at.row);
  if (cols_left <= 0) return;
#pragma unroll 2
  for (int row = lane >> 3; row < rows_left; row += kRowsPerStep) {
    std::uint16_t* const to = row_address<kTileCols>(params.output, work, at.row + row);
    if (to == nullptr) continue;
    store_vector(to + col, *reinterpret_cast<const uint4*>(chunk + swizzled_offset(row, vector)), cols_left);
  }
}

// Whether the copy engine can store this chunk: it writes whole boxes that begin at a vector of 16 bytes
// (elsewhere the instruction is illegal; the columns of a sharded weight are cut anywhere), clipped only at
// the edges of the tensor, and there only to whole vectors (seen on an H200: with n = 396 it wrote columns
// 396 to 399).
__device__ __forceinline__ bool is_bulk_chunk(const StoreParams& params, const TileWork& work,
                                              const ChunkPosition& at) {
  const bool all_rows = work.rows - at.row >= kChunkRows;
  switch (work.kind) {
    case StoreKind::kInPlace:
      return params.in_place_map != nullptr && work.col_begin % 8 == 0 &&
             (all_rows || row_in_output(work) + work.rows == params.output.rows) &&
             (work.cols - at.col >= kChunkCols ||
              (work.col_begin + work.cols == params.output.cols && params.output.cols % 8 == 0));
    case StoreKind::kWhole:
      return all_rows;
    case StoreKind::kSlabs:
      return true;
    default:
      return false;
  }
}

// By one thread: starts the copy of one chunk and closes its bulk group.
__device__ __forceinline__ void bulk_store_chunk(const StoreParams& params, const TileWork& work,
                                                 const ChunkPosition& at, const std::uint8_t* chunk) {
  if (work.kind == StoreKind::kInPlace) {
    ptx::bulk_store_2d(params.in_place_map, chunk, work.col_begin + at.col, row_in_output(work) + at.row);
  } else if (work.kind == StoreKind::kWhole) {
    ptx::bulk_store_2d(params.whole_map, chunk, at.col, static_cast<int>(work.payload) + at.row);
  } else {
    const int rows = min(kChunkRows, work.rows - at.row);
    for (int row = 0; row < rows; row += params.output.slab_rows) {
      const int to =
          __ldg(params.output.slab_rows_of + work.payload + (at.row + row) / params.output.slab_rows);
      ptx::bulk_store_2d(params.slab_map, chunk + row * 128, at.col, to);
    }
  }
  ptx::bulk_commit_group();
}

// One store warp's side of the staging ring.
template <int kSlots, int kTileCols>
class ChunkStorer {
 public:
  __device__ ChunkStorer(const StoreParams& params, const StagingBuffer<kSlots>& buffer,
                         StagingBarriers<kSlots>& barriers, int lane)
      : params_(params), buffer_(buffer), barriers_(barriers), lane_(lane) {}

  // Takes the next chunk from the ring and starts or does its copy.
  __device__ void store(const TileWork& work, const ChunkPosition& at) {
    wait_barrier(&barriers_.full[state_.slot], state_.phase);
    const std::uint8_t* chunk = buffer_.chunks[state_.slot];
    if (is_bulk_chunk(params_, work, at)) {
      if (lane_ == 0) {
        bulk_store_chunk(params_, work, at, chunk);
        if (is_reading_) {
          ptx::bulk_wait_group_read<1>();
          free_slot(previous_slot());
        }
      }
      is_reading_ = true;
    } else {
      finish_reading();
      copy_chunk_rows<kTileCols>(params_, work, at, chunk, lane_);
      ptx::mbarrier_arrive_release_cta(&barriers_.empty[state_.slot], 1);
    }
    state_.advance();
  }

  // Ends a tile: all its slots are free again.
  __device__ void finish_tile() {
    finish_reading();
    __syncwarp();
  }

  // By lane 0: all stores so far are complete, so it may signal. Its bulk stores are visible to it then, and
  // the other lanes' stores of the general path come before this through __syncwarp.
  static __device__ void wait_for_stores() {
    // Not `.read`: the data must have reached global memory before the signal is seen.
    ptx::bulk_wait_group<0>();
  }

 private:
  __device__ int previous_slot() const { return state_.slot == 0 ? kSlots - 1 : state_.slot - 1; }
  // For the warp: the copy engine has read the slot, no lane has.
  __device__ void free_slot(int slot) {
    ptx::mbarrier_arrive_release_cta(&barriers_.empty[slot], kWarpLanes);
  }
  __device__ void finish_reading() {
    if (is_reading_ && lane_ == 0) {
      ptx::bulk_wait_group_read<0>();
      free_slot(previous_slot());
    }
    is_reading_ = false;
  }

  const StoreParams& params_;
  const StagingBuffer<kSlots>& buffer_;
  StagingBarriers<kSlots>& barriers_;
  int lane_;
  bool is_reading_ = false;  // the copy engine may still read the slot before state_
  StagingState<kSlots> state_;
};

}  // namespace flashoverlap::cuda::sm90
