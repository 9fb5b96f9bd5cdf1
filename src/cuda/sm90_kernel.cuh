// The signal GEMM of sm_90a: a persistent, warp-specialised kernel layer around CUTLASS's main loop.
//
// Roles of a block's three warpgroups: the first is the producer (warp 0 loads operands with the copy engine,
// warps 2 and 3 are the store warps of the two consumers, warp 1 idles), the other two multiply, and add what
// other ranks have sent (finish.h). Every role walks the schedule by itself: a cluster takes positions p =
// cluster, cluster + clusters, ... What the operands are, what is waited for, and what happens at a tile's
// end are policies: sm90_input.cuh, gate.cuh, finish.cuh. Source of the scheme: arXiv 2504.19519, section 3;
// there the signal is raised by the block that computes, here by a warp that does nothing else.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/pipeline/pipeline.hpp>

#include "gate.cuh"
#include "schedule_walk.cuh"
#include "sm90_config.cuh"
#include "sm90_input.cuh"
#include "sm90_store.cuh"

namespace flashoverlap::cuda::sm90 {

template <class Config>
struct KernelParams {
  typename Config::Mainloop::Params mainloop;
  CUtensorMap in_place_map;
  CUtensorMap whole_map;
  CUtensorMap slab_map;
  std::int32_t m;
  std::int32_t k;
  std::int32_t weight_rows;  // rows of B: n, or n times the number of stacked weights
  DeviceTables tables;
  OutputParams output;
  bool in_place_by_bulk;
  // Counting table. Written by: the store warps, red.release.gpu, in all one per part of a tile. Waited for
  // by: one waiter per group (wait.h), acquire at gpu scope. Reset by: that waiter, to zero, once the group
  // is complete; so a launch leaves the table ready for the next one in stream order. Null: no signals.
  std::uint32_t* counters;
};

template <class Config>
struct SharedStorage {
  using Mainloop = typename Config::Mainloop;
  using Order = cutlass::OrderedSequenceBarrier<1, Config::kConsumerWarpgroups>;

  alignas(1024) typename Mainloop::TensorStorage operands;
  StagingBuffer<Config::kStagingSlots> staging[Config::kConsumerWarpgroups];
  alignas(16) typename Mainloop::PipelineStorage pipeline;
  alignas(16) typename Order::SharedStorage order;
  StagingBarriers<Config::kStagingSlots> staging_barriers[Config::kConsumerWarpgroups];
};

template <class Config>
struct Kernel {
  using Params = KernelParams<Config>;
  using Storage = SharedStorage<Config>;
  using Mainloop = typename Config::Mainloop;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using PipelineState = typename Mainloop::PipelineState;
  using Element = typename Config::Element;
  static constexpr int kSlots = Config::kStagingSlots;
  static constexpr std::uint32_t kProducerRegisters = 40;
  static constexpr std::uint32_t kConsumerRegisters = 232;
  static constexpr int kAccumulators = Config::kTileM * Config::kTileN / Config::kTileThreads;  // of a thread
  static constexpr int kLoadsAhead = kAccumulators > 128 ? 4 : 8;  // of add_to_chunk
  static constexpr int kChunksPerAtom = Config::kTileN / kChunkCols;
  // In a cooperative kernel the tensor cores wait for the epilogue: all of a lane's rows of a chunk are
  // worked on at a time, and the bias is there before the products are. In a pingpong kernel the other tile's
  // products hide that, and registers are short; beside additions the code would be too much to be inlined.
  template <class Finish>
  static constexpr int kRowsAtOnce = Finish::kAdds || kAccumulators > 128 ? 1
                                     : Config::kIsPingpong                ? 2
                                                                          : kLaneRows;
  static constexpr bool kLoadsBiasFirst = !Config::kIsPingpong;
  struct Bias {
    uint4 of_chunk[kLoadsBiasFirst ? kChunksPerAtom : 1];
  };

  enum ProducerWarp { kLoadWarp = 0, kFirstStoreWarp = 2 };

  // Where this thread stands.
  struct Place {
    int warpgroup = cutlass::canonical_warp_group_idx();
    int warp_in_group = cutlass::canonical_warp_idx_sync() % kWarpgroupWarps;
    int lane = static_cast<int>(threadIdx.x % 32);
    int block_in_cluster = static_cast<int>(cute::block_rank_in_cluster());
    int cluster = static_cast<int>(blockIdx.x) / Config::kClusterM;  // the grid is kClusterN high
    int clusters = static_cast<int>(gridDim.x) / Config::kClusterM;
    // Blocks of a cluster count along m first, as in CUTLASS.
    __device__ int block_row() const { return block_in_cluster % Config::kClusterM; }
    __device__ int block_col() const { return block_in_cluster / Config::kClusterM; }
  };

  static __device__ Pipeline make_pipeline(const Params& params, Storage& storage, const Place& place) {
    typename Pipeline::Params pipe;
    pipe.role =
        place.warpgroup == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
    pipe.is_leader = threadIdx.x % Config::kWarpgroupThreads == 0;
    pipe.num_consumers = Config::kIsPingpong ? Config::kWarpgroupThreads : 2 * Config::kWarpgroupThreads;
    pipe.num_producers = 1;
    pipe.transaction_bytes = params.mainloop.tma_transaction_bytes;
    return Pipeline(storage.pipeline, pipe, typename Config::ClusterShape{});
  }

  static constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;

  template <class Input, class Gate, class Finish>
  static __device__ void run(const Params& params, Storage& storage, const typename Input::Params& input,
                             const typename Gate::Params& gates, const typename Finish::Params& finish) {
    const Place place;
    if (threadIdx.x == 0) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      for (auto& barriers : storage.staging_barriers) barriers.init();
    }
    Pipeline pipeline = make_pipeline(params, storage, place);
    typename Storage::Order order(
        storage.order, {static_cast<std::uint32_t>(place.warpgroup - 1), Config::kWarpgroupThreads});
    // Barriers must exist in the whole cluster before anyone arrives at one.
    if constexpr (Config::kClusterBlocks > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    if (place.warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (place.warp_in_group == kLoadWarp) {
        load<Input, Gate>(params, storage, pipeline, place, input, gates);
      } else if (place.warp_in_group >= kFirstStoreWarp) {
        store<Input>(params, storage, place, place.warp_in_group - kFirstStoreWarp, input);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      multiply<Input, Finish>(params, storage, pipeline, order, place, place.warpgroup - 1, input, finish);
    }
  }

  // First position and stride of a consumer warpgroup and its store warp.
  static __device__ int first_position(const Place& place, int consumer) {
    return Config::kIsPingpong ? place.cluster + consumer * place.clusters : place.cluster;
  }
  static __device__ int stride(const Place& place) {
    return Config::kIsPingpong ? 2 * place.clusters : place.clusters;
  }
  static __device__ ScheduleWalk consumer_walk(const Params& params, const Place& place, int consumer) {
    return ScheduleWalk(params.tables, first_position(place, consumer), stride(place));
  }

  // Loads the operands of one tile: the first `depth` columns of the matrices that `operands` describes.
  static __device__ void load_columns(const typename Mainloop::Params& operands, const Params& params,
                                      int depth, const TileWork& work, Storage& storage, Pipeline& pipeline,
                                      PipelineState& state, const Place& place) {
    using namespace cute;
    Mainloop mainloop;
    using X = Underscore;
    constexpr typename Config::TileShape kTile{};
    const Tensor a = operands.tma_load_a.get_tma_tensor(make_shape(params.m, depth, 1));
    const Tensor b = operands.tma_load_b.get_tma_tensor(make_shape(params.weight_rows, depth, 1));
    const int k_tiles = (depth + Config::kTileK - 1) / Config::kTileK;
    // Tiles may start at any row: a plan cuts them from each owner's or expert's first row.
    const int row = work.row_begin + place.block_row() * Config::kTileM;
    const int weight_row = work.weight_row + place.block_col() * Config::kTileN;
    const auto a_tiles =
        local_tile(domain_offset(make_coord(row, 0, 0), a), kTile, make_coord(_, _, _), Step<_1, X, _1>{});
    const auto b_tiles = local_tile(domain_offset(make_coord(weight_row, 0, 0), b), kTile,
                                    make_coord(_, _, _), Step<X, _1, _1>{});
    mainloop.load(operands, pipeline, state, cute::make_tuple(a_tiles, b_tiles), make_coord(0, 0, _, 0),
                  make_coord_iterator(k_tiles), k_tiles, place.lane,
                  static_cast<std::uint32_t>(place.block_in_cluster), storage.operands);
    state.advance(k_tiles);
  }

  // Each block of a cluster waits at a gate by itself: its neighbours' loads reach its shared memory only
  // after it has freed a stage, not what it reads.
  template <class Input, class Gate>
  static __device__ void load(const Params& params, Storage& storage, Pipeline& pipeline, const Place& place,
                              const typename Input::Params& input_params,
                              const typename Gate::Params& gates) {
    PipelineState state = cutlass::make_producer_start_state<Pipeline>();
    const Input input(input_params, params.k);
    Gate gate(gates, params.tables.num_positions, place.cluster, place.clusters);
    ptx::wait_for_previous_kernels();
    [[maybe_unused]] int position = place.cluster;
    for (ScheduleWalk walk(params.tables, place.cluster, place.clusters); !walk.done(); walk.advance()) {
      if constexpr (Input::kHasBlocks) {
        for (int b = 0; b < input.num_blocks(); ++b) {
          gate.wait();
          if (!input.takes(position, b)) continue;
          const BlockOperands<Config>& block = input.block(b);
          load_columns(block.mainloop, params, block.depth, walk.work(), storage, pipeline, state, place);
        }
        position += place.clusters;
      } else {
        gate.wait();
        load_columns(params.mainloop, params, params.k, walk.work(), storage, pipeline, state, place);
      }
    }
    // The next launch in this stream, if it is one of ours, may set up now; it waits before it touches what
    // we write. Not earlier: its blocks would sit on the SMs that this launch leaves to communication.
    __syncwarp();  // one thread loads; the others are here already
    ptx::let_next_kernel_start();
    // A block must not exit while a neighbour may still signal its barriers.
    Mainloop mainloop;
    mainloop.load_tail(pipeline, state);
  }

  template <class Input, class Finish>
  static __device__ __forceinline__ void multiply(const Params& params, Storage& storage, Pipeline& pipeline,
                                                  typename Storage::Order& order, const Place& place,
                                                  int consumer, const typename Input::Params& input_params,
                                                  const typename Finish::Params& finish_params) {
    using namespace cute;
    Mainloop mainloop;
    typename Config::TiledMma tiled_mma;
    const Input input(input_params, params.k);
    const int thread =
        static_cast<int>(threadIdx.x) - Config::kWarpgroupThreads * (Config::kIsPingpong ? 1 + consumer : 1);
    int position = first_position(place, consumer);
    PipelineState state;
    StagingState<kSlots> staging;
    if (Config::kIsPingpong && consumer == 1) state.advance(input.k_tiles(first_position(place, 0)));
    Finish finish(finish_params, params.tables.num_positions, position, stride(place));
    // What other kernels have written is read here: the count of arrivals that begins anew, a residual.
    if constexpr (Finish::kChanges) ptx::wait_for_previous_kernels();

    for (ScheduleWalk walk = consumer_walk(params, place, consumer); !walk.done(); walk.advance()) {
      const int k_tiles = input.k_tiles(position);
      Tensor accumulators = partition_fragment_C(tiled_mma, take<0, 2>(typename Config::TileShape{}));
      [[maybe_unused]] Bias bias;
      if constexpr (Finish::kChanges && kLoadsBiasFirst) load_bias(walk.work(), place, finish, bias);
      if constexpr (Config::kIsPingpong) order.wait();
      mainloop.mma(pipeline, state, accumulators, k_tiles, thread, storage.operands, params.mainloop);
      if constexpr (Config::kIsPingpong) order.arrive();
      mainloop.mma_tail(pipeline, state, k_tiles);
      // The other consumer's tile comes in between.
      state.advance(Config::kIsPingpong ? k_tiles + input.k_tiles(position + place.clusters) : k_tiles);
      finish.begin_tile(walk.work());
      if constexpr (Input::kHasBlocks) {
        const int computed = position;
        position += stride(place);
        if (input.is_begun(computed)) {
          input.keep(accumulators, computed, place.block_in_cluster, thread);
          continue;
        }
        if (input.is_continued(computed))
          input.add_kept(accumulators, computed, place.block_in_cluster, thread);
      }
      stage_tile(storage, accumulators, staging, consumer, place, walk.work(), bias, finish);
    }
  }

  // Of the tile's chunk in this row of 64-row atoms and column of chunks.
  static __device__ ChunkPosition chunk_position(const Place& place, int consumer, int atom, int chunk) {
    const int atom_row = Config::kIsPingpong ? atom * 64 : atom * 128 + consumer * 64;
    return {.row = place.block_row() * Config::kTileM + atom_row,
            .col = place.block_col() * Config::kTileN + chunk * kChunkCols};
  }

  template <class Finish>
  static __device__ __forceinline__ void load_bias(const TileWork& work, const Place& place,
                                                   const Finish& finish, Bias& bias) {
    if (!finish.has_epilogue_of(work)) return;
#pragma unroll
    for (int chunk = 0; chunk < kChunksPerAtom; ++chunk) {
      const int col = chunk_position(place, 0, 0, chunk).col + (place.lane & 7) * kVectorElements;
      bias.of_chunk[chunk] = finish.bias(work, col);
    }
  }

  template <class Accumulators, class Finish>
  static __device__ __forceinline__ void stage_tile(Storage& storage, const Accumulators& accumulators,
                                                    StagingState<kSlots>& staging, int consumer,
                                                    const Place& place, const TileWork& work,
                                                    const Bias& bias, const Finish& finish) {
    auto& barriers = storage.staging_barriers[consumer];
    CUTLASS_PRAGMA_UNROLL
    for (int index = 0; index < Config::kAtomsPerWarpgroup * kChunksPerAtom; ++index) {
      const int chunk = index % kChunksPerAtom;
      std::uint8_t* const staged = storage.staging[consumer].chunks[staging.slot];
      const ChunkPart mine(work, chunk_position(place, consumer, index / kChunksPerAtom, chunk), staged,
                           place.warp_in_group, place.lane);
      [[maybe_unused]] ResidualRows<kRowsAtOnce<Finish>> residual;
      if constexpr (Finish::kChanges) {
        if (finish.has_epilogue()) residual.load(work, mine, mine.first, finish);
      }
      wait_barrier(&barriers.empty[staging.slot], staging.phase ^ 1);
      stage_chunk<kIsBf16>(staged, accumulators, index * 32, place.warp_in_group, place.lane);
      bool is_changed = false;
      if constexpr (Finish::kChanges) {
        is_changed = finish.changes();
        if (is_changed) __syncwarp();
        if constexpr (Finish::kAdds) {
          if (finish.adds()) add_to_chunk<kLoadsAhead>(work, mine, finish);
        }
        if (finish.has_epilogue()) {
          const uint4 of_chunk =
              kLoadsBiasFirst ? bias.of_chunk[kLoadsBiasFirst ? chunk : 0] : finish.bias(work, mine.col());
          apply_to_chunk(work, mine, of_chunk, residual, finish);
        }
      }
      give_to_store_warp(barriers.full[staging.slot], is_changed, place.lane);
      staging.advance();
    }
  }

  // A warp is done with its rows of a staging slot; is_changed: each lane has written some by itself.
  static __device__ __forceinline__ void give_to_store_warp(std::uint64_t& full, bool is_changed, int lane) {
    ptx::fence_proxy_async_shared();
    if (is_changed) {
      ptx::mbarrier_arrive_release_cta(&full, 1);
    } else {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive_release_cta(&full, kWarpLanes);
    }
  }

  static __device__ StoreParams store_params(const Params& params) {
    return {.output = params.output,
            .in_place_map = params.in_place_by_bulk ? &params.in_place_map : nullptr,
            .whole_map = &params.whole_map,
            .slab_map = &params.slab_map};
  }

  template <class Input>
  static __device__ void store(const Params& params, Storage& storage, const Place& place, int consumer,
                               const typename Input::Params& input_params) {
    const StoreParams out = store_params(params);
    ChunkStorer<kSlots, Config::kPlanTileN> storer(out, storage.staging[consumer],
                                                   storage.staging_barriers[consumer], place.lane);
    std::uint32_t finished = 0;
    [[maybe_unused]] int position = first_position(place, consumer);
    ptx::wait_for_previous_kernels();
    for (ScheduleWalk walk = consumer_walk(params, place, consumer); !walk.done(); walk.advance()) {
      if constexpr (Input::kHasBlocks) {
        const bool is_begun = Input(input_params, params.k).is_begun(position);
        position += stride(place);
        if (is_begun) continue;
      }
      const TileWork& work = walk.work();
      for (int atom = 0; atom < Config::kAtomsPerWarpgroup; ++atom) {
        for (int chunk = 0; chunk < kChunksPerAtom; ++chunk)
          storer.store(work, chunk_position(place, consumer, atom, chunk));
      }
      storer.finish_tile();
      ++finished;
      // One addition for all of this walk's tiles of a group, when the last of them is stored: the group is
      // not complete earlier anyway, and a release costs (the pingpong kernels were up to 1.3 % slower with
      // one per tile).
      if (walk.group_goes_on()) continue;
      if (place.lane == 0) {
        storer.wait_for_stores();
        if (params.counters != nullptr && work.group >= 0)
          ptx::red_release_gpu_add(params.counters + work.group, finished);
      }
      finished = 0;
    }
  }
};

template <class Config, class Input, class Gate, class Finish>
__device__ __forceinline__ void run_kernel(const KernelParams<Config>& params,
                                           const typename Input::Params& input,
                                           const typename Gate::Params& gates,
                                           const typename Finish::Params& finish) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::uint8_t raw[];
  // Dynamic shared memory is aligned to 16 bytes only by promise; the swizzle atoms need 1024.
  const std::uint32_t misalignment = ptx::shared_address(raw) & 1023U;
  auto& storage =
      *reinterpret_cast<SharedStorage<Config>*>(raw + (misalignment == 0 ? 0 : 1024U - misalignment));
  Kernel<Config>::template run<Input, Gate, Finish>(params, storage, input, gates, finish);
#endif
}

template <class Config, bool kAdds>
using FinishOf = TileFinish<Kernel<Config>::kIsBf16, kAdds>;

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    signal_gemm_sm90(const __grid_constant__ KernelParams<Config> params) {
  run_kernel<Config, MatrixInput<Config>, NoGate, NoFinish>(params, {}, {}, {});
}

// The same with gates, at the start of tiles, at their end or on the way through the blocks of A: kernels of
// their own, so that the one above stays as it is. Their tiles' epilogue is applied before they are stored.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gated_gemm_sm90(const __grid_constant__ KernelParams<Config> params,
                    const __grid_constant__ DeviceGates gates, const __grid_constant__ DeviceFinish finish) {
  run_kernel<Config, MatrixInput<Config>, SliceGate<true>, FinishOf<Config, false>>(params, {}, gates,
                                                                                    finish);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    finishing_gemm_sm90(const __grid_constant__ KernelParams<Config> params,
                        const __grid_constant__ DeviceFinish finish) {
  run_kernel<Config, MatrixInput<Config>, NoGate, FinishOf<Config, true>>(params, {}, {}, finish);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    block_gemm_sm90(const __grid_constant__ KernelParams<Config> params,
                    const __grid_constant__ typename BlockInput<Config>::Params input,
                    const __grid_constant__ DeviceGates gates, const __grid_constant__ DeviceFinish finish) {
  run_kernel<Config, BlockInput<Config>, SliceGate<true>, FinishOf<Config, false>>(params, input, gates,
                                                                                   finish);
}

}  // namespace flashoverlap::cuda::sm90
