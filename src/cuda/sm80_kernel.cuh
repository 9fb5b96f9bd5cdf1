// The signal GEMM for everything that is not sm_90a, and for operands that the copy engine cannot take: a
// persistent kernel on mma.sync with cp.async, for sm_80 and later.
//
// A block computes a tile of kTileM x kTileN, each warp a kWarpM x kWarpN part. Operands go through kStages
// buffers of 32 columns; at the end the tile is converted into shared memory and copied out row by row
// through placement.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "finish.cuh"
#include "gate.cuh"
#include "ptx.cuh"
#include "row_store.cuh"
#include "schedule_walk.cuh"
#include "tile_work.h"

namespace flashoverlap::cuda::sm80 {

/// kAlignment: elements to which A, B, lda and ldb are aligned; 8, 4 and 2 copy 16, 8 and 4 bytes at a time
/// in the background, 1 copies element by element.
template <bool kIsBf16_, int kTileM_, int kTileN_, int kWarpM_, int kWarpN_, int kAlignment_>
struct Config {
  static constexpr bool kIsBf16 = kIsBf16_;
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileK = 32;
  static constexpr int kWarpM = kWarpM_;
  static constexpr int kWarpN = kWarpN_;
  static constexpr int kAlignment = kAlignment_;
  static constexpr int kStages = 4;
  static constexpr int kWarpRows = kTileM / kWarpM;
  static constexpr int kWarpCols = kTileN / kWarpN;
  static constexpr int kThreads = kWarpRows * kWarpCols * 32;
  static constexpr int kAtomsM = kWarpM / 16;
  static constexpr int kAtomsN = kWarpN / 8;
  static constexpr int kRowVectors = kTileK / 8;  // 16-byte vectors of one operand row
  static constexpr int kStageElements = (kTileM + kTileN) * kTileK;
  // Rows of the converted tile are padded by one vector, so that rows start in different banks.
  static constexpr int kOutputStride = kTileN + 8;
  static constexpr int kOperandBytes = kStages * kStageElements * 2;
  static constexpr int kOutputBytes = kTileM * kOutputStride * 2;
  static constexpr int kSharedBytes = kOperandBytes > kOutputBytes ? kOperandBytes : kOutputBytes;
  static_assert(kTileM * kRowVectors % kThreads == 0 && kTileN * kRowVectors % kThreads == 0);
  static_assert(kSharedBytes <= 99 * 1024, "shared memory of an sm_86 or sm_89 block");
};

/// Columns of A, and those of B that they are multiplied with.
struct Operands {
  const std::uint16_t* a;
  std::int64_t lda;
  const std::uint16_t* b;
  std::int64_t ldb;
  std::int32_t k;
};

struct KernelParams {
  Operands operands;
  const Operands* blocks;   // of A, which the main loop takes one after the other; null: `operands` are all
  std::int32_t num_blocks;  // 0: none
  std::int32_t m;
  std::int32_t weight_rows;
  DeviceTables tables;
  OutputParams output;
  std::uint32_t* counters;  // as in sm90_kernel.cuh, with one addition per tile
};

// Operand tiles in shared memory: two rows of 64 bytes in a line of 128, the vectors of a line permuted by
// its index, so that the eight rows that ldmatrix reads at once lie in different banks.
__device__ __forceinline__ int operand_offset(int row, int vector) {
  const int line = row / 2;
  return line * 64 + (((row & 1) * 4 + vector) ^ (line & 7)) * 8;
}

// kIsGated: others write the operands while the kernel runs, so that loads past the coherent caches are out.
template <class Config, bool kIsGated>
__device__ __forceinline__ void load_vector(std::uint16_t* to, const std::uint16_t* from, int valid) {
  constexpr int kPiece = Config::kAlignment;
  if constexpr (kPiece >= 2) {
#pragma unroll
    for (int i = 0; i < 8; i += kPiece) {
      const int bytes = max(0, min(kPiece, valid - i)) * 2;
      ptx::copy_async<kPiece * 2>(to + i, bytes > 0 ? from + i : from, bytes);
    }
  } else {
    std::uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= valid) continue;
      const std::uint16_t element =
          kIsGated ? *static_cast<const volatile std::uint16_t*>(from + i) : __ldg(from + i);
      words[i / 2] |= static_cast<std::uint32_t>(element) << (16 * (i & 1));
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// One operand's rows of a tile, kRows of them, of which the first `rows_left` exist. A thread loads the same
// vectors of every stage, so their addresses are worked out once a tile.
template <class Config, int kRows, bool kIsGated>
class OperandLoader {
 public:
  __device__ OperandLoader(const std::uint16_t* base, std::int64_t ld, std::int64_t first_row, int rows_left)
      : base_(base) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int row = row_of(i);
      // An address outside the operand is never formed, let alone read.
      from_[i] = row < rows_left ? base + (first_row + row) * ld + vector() * 8 : nullptr;
    }
  }

  // By the whole block: columns [k, k + 32) into `shared`, zeros where there is nothing.
  __device__ void load(std::uint16_t* shared, int k, int k_end) const {
    const int valid_cols = max(0, min(8, k_end - k - vector() * 8));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int valid = from_[i] != nullptr ? valid_cols : 0;
      load_vector<Config, kIsGated>(shared + operand_offset(row_of(i), vector()),
                                    valid > 0 ? from_[i] + k : base_, valid);
    }
  }

 private:
  static constexpr int kVectors = kRows * Config::kRowVectors / Config::kThreads;
  static_assert(Config::kThreads % Config::kRowVectors == 0, "a thread's vectors lie in the same columns");
  static __device__ int vector() {
    return static_cast<int>(threadIdx.x) % Config::kRowVectors;
  }
  static __device__ int row_of(int i) {
    return (i * Config::kThreads + static_cast<int>(threadIdx.x)) / Config::kRowVectors;
  }

  const std::uint16_t* base_;
  const std::uint16_t* from_[kVectors];
};

template <class Config>
struct Accumulators {
  float values[Config::kAtomsM][Config::kAtomsN][4];
};

// One instruction's depth (16 columns) of a stage.
template <class Config>
__device__ __forceinline__ void multiply_step(const std::uint16_t* stage, int step, Accumulators<Config>& acc,
                                              int warp_row, int warp_col, int lane) {
  const std::uint16_t* a = stage;
  const std::uint16_t* b = stage + Config::kTileM * Config::kTileK;
  std::uint32_t a_fragments[Config::kAtomsM][4];
  std::uint32_t b_fragments[Config::kAtomsN / 2][4];
#pragma unroll
  for (int i = 0; i < Config::kAtomsM; ++i) {
    const int row = warp_row * Config::kWarpM + i * 16 + (lane & 15);
    ptx::ldmatrix_x4(a_fragments[i], a + operand_offset(row, step * 2 + (lane >> 4)));
  }
#pragma unroll
  for (int j = 0; j < Config::kAtomsN / 2; ++j) {
    // Two neighbouring 8-row blocks of B: matrices (block 0, k 0..7), (block 0, k 8..15), (block 1, ...).
    const int row = warp_col * Config::kWarpN + j * 16 + (lane & 7) + ((lane >> 4) << 3);
    ptx::ldmatrix_x4(b_fragments[j], b + operand_offset(row, step * 2 + ((lane >> 3) & 1)));
  }
#pragma unroll
  for (int i = 0; i < Config::kAtomsM; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kAtomsN; ++j) {
      ptx::mma_m16n8k16<Config::kIsBf16>(acc.values[i][j], a_fragments[i], b_fragments[j / 2][(j & 1) * 2],
                                         b_fragments[j / 2][(j & 1) * 2 + 1]);
    }
  }
}

template <class Config, bool kIsGated>
__device__ __forceinline__ void multiply_tile(const Operands& operands, const KernelParams& params,
                                              const TileWork& work, std::uint16_t* shared,
                                              Accumulators<Config>& acc, int warp, int lane) {
  const OperandLoader<Config, Config::kTileM, kIsGated> a(operands.a, operands.lda, work.row_begin,
                                                          params.m - work.row_begin);
  const OperandLoader<Config, Config::kTileN, kIsGated> b(operands.b, operands.ldb, work.weight_row,
                                                          params.weight_rows - work.weight_row);
  const int k_tiles = (operands.k + Config::kTileK - 1) / Config::kTileK;
  const auto load_stage = [&](int k_tile) {
    if (k_tile < k_tiles) {
      std::uint16_t* stage = shared + (k_tile % Config::kStages) * Config::kStageElements;
      a.load(stage, k_tile * Config::kTileK, operands.k);
      b.load(stage + Config::kTileM * Config::kTileK, k_tile * Config::kTileK, operands.k);
    }
    ptx::copy_async_commit_group();  // also an empty one: groups are counted
  };
  for (int k_tile = 0; k_tile < Config::kStages - 1; ++k_tile) load_stage(k_tile);
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    ptx::copy_async_wait_group<Config::kStages - 2>();
    __syncthreads();  // the stage is complete for all, and the one before it is no longer read by anyone
    const std::uint16_t* stage = shared + (k_tile % Config::kStages) * Config::kStageElements;
    static_assert(Config::kTileK == 2 * 16);
    // The next loads go between the two steps: the matrix units have work while their addresses are worked
    // out.
    multiply_step<Config>(stage, 0, acc, warp / Config::kWarpCols, warp % Config::kWarpCols, lane);
    load_stage(k_tile + Config::kStages - 1);
    multiply_step<Config>(stage, 1, acc, warp / Config::kWarpCols, warp % Config::kWarpCols, lane);
  }
  ptx::copy_async_wait_group<0>();
  __syncthreads();
}

template <class Config>
__device__ __forceinline__ void convert_tile(const Accumulators<Config>& acc, std::uint16_t* shared, int warp,
                                             int lane) {
  const int first_row = warp / Config::kWarpCols * Config::kWarpM + lane / 4;
  const int first_col = warp % Config::kWarpCols * Config::kWarpN + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < Config::kAtomsM; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kAtomsN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint16_t* to =
            shared + (first_row + i * 16 + half * 8) * Config::kOutputStride + first_col + j * 8;
        *reinterpret_cast<std::uint32_t*>(to) =
            pack2<Config::kIsBf16>(acc.values[i][j][half * 2], acc.values[i][j][half * 2 + 1]);
      }
    }
  }
}

// What is stored of 8 elements of a tile.
template <class Finish>
__device__ __forceinline__ uint4 finish_vector(const uint4& own, const TileWork& work, int row, int col,
                                               const Finish& finish) {
  uint4 elements = own;
  if constexpr (Finish::kAdds) {
    if (finish.adds()) {
      typename Finish::Sum sum;
      for (int rank = 0; rank < finish.num_ranks(); ++rank)
        sum.add(finish.is_own(rank) ? own : finish.part(work, row, col, rank));
      elements = sum.take();
    }
  }
  if (!finish.has_epilogue()) return elements;
  uint4 vectors[1] = {elements};
  const uint4 residual[1] = {finish.residual(work, row, col)};
  finish.complete(vectors, finish.bias(work, col), residual);
  finish.store_residual_out(vectors[0], work, row, col);
  return vectors[0];
}

template <class Config, class Finish>
__device__ __forceinline__ void store_tile(const KernelParams& params, const TileWork& work,
                                           const std::uint16_t* shared, const Finish& finish) {
  constexpr int kVectors = Config::kTileN / 8;
  for (int index = static_cast<int>(threadIdx.x); index < work.rows * kVectors; index += Config::kThreads) {
    const int row = index / kVectors;
    const int col = index % kVectors * 8;
    if (col >= work.cols) continue;
    std::uint16_t* const to = row_address<Config::kTileN>(params.output, work, row);
    if (to == nullptr) continue;
    uint4 elements = *reinterpret_cast<const uint4*>(shared + row * Config::kOutputStride + col);
    if constexpr (Finish::kChanges) {
      if (finish.changes()) elements = finish_vector(elements, work, row, col, finish);
    }
    store_vector(to + col, elements, work.cols - col);
  }
}

template <class Config, class Gate, class Finish>
__device__ __forceinline__ void run_kernel(const KernelParams& params, const typename Gate::Params& gates,
                                           const typename Finish::Params& finish_params) {
  extern __shared__ __align__(128) std::uint16_t shared[];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(gridDim.x);
  Gate gate(gates, params.tables.num_positions, first, step);
  Finish finish(finish_params, params.tables.num_positions, first, step);
  for (ScheduleWalk walk(params.tables, first, step); !walk.done(); walk.advance()) {
    Accumulators<Config> acc{};
    for (int b = 0; b < max(1, params.num_blocks); ++b) {
      gate.wait();  // every warp for its own loads
      const Operands& operands = params.num_blocks > 0 ? params.blocks[b] : params.operands;
      multiply_tile<Config, !std::is_same_v<Gate, NoGate>>(operands, params, walk.work(), shared, acc, warp,
                                                           lane);
    }
    convert_tile<Config>(acc, shared, warp, lane);
    __syncthreads();
    finish.begin_tile(walk.work());  // every warp for its own part
    store_tile<Config>(params, walk.work(), shared, finish);
    // Orders every thread's stores before thread 0's addition, and every thread's reads before the next
    // tile's loads.
    __syncthreads();
    if (threadIdx.x == 0 && params.counters != nullptr && walk.work().group >= 0) {
      __threadfence();
      ptx::red_release_gpu_add(params.counters + walk.work().group, 1);
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    signal_gemm_sm80(const __grid_constant__ KernelParams params) {
  run_kernel<Config, NoGate, NoFinish>(params, {}, {});
}

// The same with gates, at the start of tiles and of blocks, or at the end of tiles: kernels of their own, so
// that the one above stays as it is.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gated_gemm_sm80(const __grid_constant__ KernelParams params, const __grid_constant__ DeviceGates gates,
                    const __grid_constant__ DeviceFinish finish) {
  run_kernel<Config, SliceGate<false>, TileFinish<Config::kIsBf16, false>>(params, gates, finish);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    finishing_gemm_sm80(const __grid_constant__ KernelParams params,
                        const __grid_constant__ DeviceFinish finish) {
  run_kernel<Config, NoGate, TileFinish<Config::kIsBf16, true>>(params, {}, finish);
}

}  // namespace flashoverlap::cuda::sm80
