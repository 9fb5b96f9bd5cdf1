// The signal GEMM for everything that is not sm_90a, and for operands that the copy engine cannot take: a persistent kernel
// on mma.sync with cp.async, for sm_80 and later.
//
// A block of eight warps computes a tile of kTileM x kTileN, each warp a kWarpM x kWarpN part. Operands go through kStages
// buffers of 32 columns; at the end the tile is converted into shared memory and copied out row by row through placement.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "row_store.cuh"
#include "schedule_walk.cuh"
#include "tile_work.h"

namespace flashoverlap::cuda::sm80 {

/// kAlignment: elements to which A, B, lda and ldb are aligned; 8, 4 and 2 copy 16, 8 and 4 bytes at a time in the
/// background, 1 copies element by element.
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
  static constexpr int kThreads = 256;
  static constexpr int kWarpRows = kTileM / kWarpM;
  static constexpr int kWarpCols = kTileN / kWarpN;
  static constexpr int kAtomsM = kWarpM / 16;
  static constexpr int kAtomsN = kWarpN / 8;
  static constexpr int kRowVectors = kTileK / 8;  // 16-byte vectors of one operand row
  static constexpr int kStageElements = (kTileM + kTileN) * kTileK;
  // Rows of the converted tile are padded by one vector, so that rows start in different banks.
  static constexpr int kOutputStride = kTileN + 8;
  static constexpr int kOperandBytes = kStages * kStageElements * 2;
  static constexpr int kOutputBytes = kTileM * kOutputStride * 2;
  static constexpr int kSharedBytes = kOperandBytes > kOutputBytes ? kOperandBytes : kOutputBytes;
  static_assert(kWarpRows * kWarpCols * 32 == kThreads);
  static_assert(kSharedBytes <= 99 * 1024, "shared memory of an sm_86 or sm_89 block");
};

struct KernelParams {
  const std::uint16_t* a;
  std::int64_t lda;
  const std::uint16_t* b;
  std::int64_t ldb;
  std::int32_t k;
  std::int32_t weight_rows;
  DeviceTables tables;
  OutputParams output;
  std::uint32_t* counters;  // as in sm90_kernel.cuh, with one addition per tile
};

// Operand tiles in shared memory: two rows of 64 bytes in a line of 128, the vectors of a line permuted by its index, so that
// the eight rows that ldmatrix reads at once lie in different banks.
__device__ __forceinline__ int operand_offset(int row, int vector) {
  const int line = row / 2;
  return line * 64 + (((row & 1) * 4 + vector) ^ (line & 7)) * 8;
}

// One operand's rows: where they start, and how far they go.
struct OperandView {
  const std::uint16_t* first;  // of row 0 of the tile
  std::int64_t ld;
  int rows_left;  // rows of the tile that exist
};

template <class Config>
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
      if (i < valid) words[i / 2] |= static_cast<std::uint32_t>(__ldg(from + i)) << (16 * (i & 1));
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// By the whole block: rows [0, kRows) of columns [k, k + 32), zeros where there is nothing.
template <class Config, int kRows>
__device__ __forceinline__ void load_operand(std::uint16_t* shared, const OperandView& view, const std::uint16_t* base, int k,
                                             int k_end) {
  constexpr int kVectors = kRows * Config::kRowVectors;
#pragma unroll
  for (int i = 0; i < kVectors / Config::kThreads; ++i) {
    const int index = i * Config::kThreads + static_cast<int>(threadIdx.x);
    const int row = index / Config::kRowVectors;
    const int vector = index % Config::kRowVectors;
    const int col = k + vector * 8;
    const int valid = row < view.rows_left ? max(0, min(8, k_end - col)) : 0;
    // An address outside the operand is never formed, let alone read.
    const std::uint16_t* from = valid > 0 ? view.first + row * view.ld + col : base;
    load_vector<Config>(shared + operand_offset(row, vector), from, valid);
  }
}

template <class Config>
struct Accumulators {
  float values[Config::kAtomsM][Config::kAtomsN][4];
};

template <class Config>
__device__ __forceinline__ void multiply_stage(const std::uint16_t* stage, Accumulators<Config>& acc, int warp_row, int warp_col,
                                               int lane) {
  const std::uint16_t* a = stage;
  const std::uint16_t* b = stage + Config::kTileM * Config::kTileK;
#pragma unroll
  for (int step = 0; step < Config::kTileK / 16; ++step) {
    std::uint32_t b_fragments[Config::kAtomsN / 2][4];
#pragma unroll
    for (int j = 0; j < Config::kAtomsN / 2; ++j) {
      // Two neighbouring 8-row blocks of B: matrices (block 0, k 0..7), (block 0, k 8..15), (block 1, ...).
      const int row = warp_col * Config::kWarpN + j * 16 + (lane & 7) + ((lane >> 4) << 3);
      ptx::ldmatrix_x4(b_fragments[j], b + operand_offset(row, step * 2 + ((lane >> 3) & 1)));
    }
#pragma unroll
    for (int i = 0; i < Config::kAtomsM; ++i) {
      std::uint32_t a_fragment[4];
      const int row = warp_row * Config::kWarpM + i * 16 + (lane & 15);
      ptx::ldmatrix_x4(a_fragment, a + operand_offset(row, step * 2 + (lane >> 4)));
#pragma unroll
      for (int j = 0; j < Config::kAtomsN; ++j) {
        ptx::mma_m16n8k16<Config::kIsBf16>(acc.values[i][j], a_fragment, b_fragments[j / 2][(j & 1) * 2],
                                           b_fragments[j / 2][(j & 1) * 2 + 1]);
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void multiply_tile(const KernelParams& params, const TileWork& work, std::uint16_t* shared,
                                              Accumulators<Config>& acc, int warp, int lane) {
  const OperandView a{params.a + work.row_begin * params.lda, params.lda, min(Config::kTileM, params.output.m - work.row_begin)};
  const OperandView b{params.b + work.weight_row * params.ldb, params.ldb,
                      min(Config::kTileN, params.weight_rows - work.weight_row)};
  const int k_tiles = (params.k + Config::kTileK - 1) / Config::kTileK;
  const auto load_stage = [&](int k_tile) {
    if (k_tile < k_tiles) {
      std::uint16_t* stage = shared + (k_tile % Config::kStages) * Config::kStageElements;
      load_operand<Config, Config::kTileM>(stage, a, params.a, k_tile * Config::kTileK, params.k);
      load_operand<Config, Config::kTileN>(stage + Config::kTileM * Config::kTileK, b, params.b, k_tile * Config::kTileK,
                                           params.k);
    }
    ptx::copy_async_commit_group();  // also an empty one: groups are counted
  };
  for (int k_tile = 0; k_tile < Config::kStages - 1; ++k_tile) load_stage(k_tile);
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    ptx::copy_async_wait_group<Config::kStages - 2>();
    __syncthreads();  // the stage is complete for all, and the one before it is no longer read by anyone
    load_stage(k_tile + Config::kStages - 1);
    multiply_stage<Config>(shared + (k_tile % Config::kStages) * Config::kStageElements, acc, warp / Config::kWarpCols,
                           warp % Config::kWarpCols, lane);
  }
  ptx::copy_async_wait_group<0>();
  __syncthreads();
}

template <class Config>
__device__ __forceinline__ void convert_tile(const Accumulators<Config>& acc, std::uint16_t* shared, int warp, int lane) {
  const int first_row = warp / Config::kWarpCols * Config::kWarpM + lane / 4;
  const int first_col = warp % Config::kWarpCols * Config::kWarpN + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < Config::kAtomsM; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kAtomsN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint16_t* to = shared + (first_row + i * 16 + half * 8) * Config::kOutputStride + first_col + j * 8;
        *reinterpret_cast<std::uint32_t*>(to) =
            pack2<Config::kIsBf16>(acc.values[i][j][half * 2], acc.values[i][j][half * 2 + 1]);
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_tile(const KernelParams& params, const TileWork& work, const std::uint16_t* shared) {
  constexpr int kVectors = Config::kTileN / 8;
  for (int index = static_cast<int>(threadIdx.x); index < work.rows * kVectors; index += Config::kThreads) {
    const int row = index / kVectors;
    const int col = index % kVectors * 8;
    if (col >= work.cols) continue;
    std::uint16_t* const to = row_address<Config::kTileN>(params.output, work, row);
    if (to != nullptr) {
      store_vector(to + col, *reinterpret_cast<const uint4*>(shared + row * Config::kOutputStride + col), work.cols - col);
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) signal_gemm_sm80(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(128) std::uint16_t shared[];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (ScheduleWalk walk(params.tables, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)); !walk.done();
       walk.advance()) {
    Accumulators<Config> acc{};
    multiply_tile<Config>(params, walk.work(), shared, acc, warp, lane);
    convert_tile<Config>(acc, shared, warp, lane);
    __syncthreads();
    store_tile<Config>(params, walk.work(), shared);
    // Orders every thread's stores before thread 0's addition, and every thread's reads before the next tile's loads.
    __syncthreads();
    if (threadIdx.x == 0 && params.counters != nullptr && walk.work().group >= 0) {
      __threadfence();
      ptx::red_release_gpu_add(params.counters + walk.work().group, 1);
    }
  }
}

}  // namespace flashoverlap::cuda::sm80
