// Where a kernel's operands lie: A and B as one matrix each, or A in blocks of columns.
#pragma once

#include <cute/tensor.hpp>

#include "sm90_config.cuh"

namespace flashoverlap::cuda::sm90 {

/// One matrix each. Every tile takes as many steps of the main loop.
template <class Config>
struct MatrixInput {
  struct Params {};
  static constexpr bool kHasBlocks = false;
  __device__ MatrixInput(const Params& /*params*/, int k)
      : k_tiles_((k + Config::kTileK - 1) / Config::kTileK) {}
  __device__ int k_tiles(int /*position*/) const { return k_tiles_; }

 private:
  int k_tiles_;
};

/// Columns of A as a matrix of their own, with the columns of B that they are multiplied with.
template <class Config>
struct BlockOperands {
  typename Config::Mainloop::Params mainloop;
  std::int32_t depth;
};

/// A in blocks, which the main loop takes one after the other, each when its gate opens. So that the first
/// tiles do not stand still until the columns of all other ranks have arrived, tiles may be *begun*: the
/// first `begun` positions compute the first block's product alone and keep it in float32; the `begun`
/// positions after them are the same tiles, which take the other blocks and add what was kept. Whoever
/// computes position p computes p + begun too, with the same threads, so nothing need be waited for between
/// the two.
template <class Config>
struct BlockInput {
  struct Params {
    const BlockOperands<Config>* blocks = nullptr;  ///< [num_blocks]
    std::int32_t num_blocks = 0;
    std::int32_t first_k_tiles = 0;  ///< steps of the main loop in the first block
    std::int32_t all_k_tiles = 0;
    std::int32_t begun = 0;
    float4* sums = nullptr;  ///< [begun][blocks of a cluster][accumulators / 4][threads of a tile]
  };
  static constexpr bool kHasBlocks = true;
  __device__ BlockInput(const Params& params, int /*k*/) : params_(params) {}

  __device__ bool is_begun(int position) const { return position < params_.begun; }
  __device__ bool is_continued(int position) const {
    return position >= params_.begun && position < 2 * params_.begun;
  }
  __device__ int num_blocks() const { return params_.num_blocks; }
  /// Whether block b is part of what is computed at this position.
  __device__ bool takes(int position, int b) const {
    return b == 0 ? !is_continued(position) : !is_begun(position);
  }
  __device__ const BlockOperands<Config>& block(int b) const { return params_.blocks[b]; }
  __device__ int k_tiles(int position) const {
    if (is_begun(position)) return params_.first_k_tiles;
    return params_.all_k_tiles - (is_continued(position) ? params_.first_k_tiles : 0);
  }

  /// Keeps a thread's accumulators of a tile that is begun.
  template <class Accumulators>
  __device__ void keep(const Accumulators& accumulators, int position, int block_in_cluster,
                       int thread) const {
    float4* const to = kept(position, block_in_cluster, thread);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      __stcg(to + i * kTileThreads, make_float4(accumulators(4 * i), accumulators(4 * i + 1),
                                                accumulators(4 * i + 2), accumulators(4 * i + 3)));
    }
  }
  /// Adds what was kept.
  template <class Accumulators>
  __device__ void add_kept(Accumulators& accumulators, int position, int block_in_cluster, int thread) const {
    const float4* const from = kept(position - params_.begun, block_in_cluster, thread);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      const float4 quad = __ldcg(from + i * kTileThreads);
      accumulators(4 * i) += quad.x;
      accumulators(4 * i + 1) += quad.y;
      accumulators(4 * i + 2) += quad.z;
      accumulators(4 * i + 3) += quad.w;
    }
  }

 private:
  static constexpr int kTileThreads = Config::kTileThreads;
  static constexpr int kQuads = Config::kTileM * Config::kTileN / kTileThreads / 4;
  __device__ float4* kept(int slot, int block_in_cluster, int thread) const {
    return params_.sums +
           static_cast<std::int64_t>(slot * Config::kClusterBlocks + block_in_cluster) * kQuads *
               kTileThreads +
           thread;
  }

  const Params& params_;
};

}  // namespace flashoverlap::cuda::sm90
