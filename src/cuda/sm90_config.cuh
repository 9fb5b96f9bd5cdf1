// The shapes and types of one sm_90a signal GEMM, and its main loop, which is CUTLASS's own and untouched.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <type_traits>

namespace flashoverlap::cuda::sm90 {

enum class Schedule {
  kCooperative,  ///< two warpgroups share a tile, one half of its rows each
  kPingpong,     ///< two warpgroups take tiles in turn: one multiplies while the other stores
};

/// One kernel. `kTileM x kTileN` is what a block computes; a cluster of `kClusterM x kClusterN` blocks shares
/// its operands by multicast and computes one plan tile.
template <class Element_, Schedule kSchedule_, int kTileM_, int kTileN_, int kClusterM_, int kClusterN_,
          int kStages_, int kStagingSlots_>
struct Config {
  using Element = Element_;
  static constexpr Schedule kSchedule = kSchedule_;
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileK = 64;  // 128 bytes: one swizzle atom
  static constexpr int kClusterM = kClusterM_;
  static constexpr int kClusterN = kClusterN_;
  static constexpr int kStages = kStages_;
  static constexpr int kStagingSlots = kStagingSlots_;

  static constexpr int kClusterBlocks = kClusterM * kClusterN;
  static constexpr int kPlanTileM = kTileM * kClusterM;
  static constexpr int kPlanTileN = kTileN * kClusterN;
  static constexpr bool kIsPingpong = kSchedule == Schedule::kPingpong;
  // Each store warp of each block adds one when its part of the plan tile is stored.
  static constexpr int kSignalsPerTile = kClusterBlocks * (kIsPingpong ? 1 : 2);

  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kTileThreads = kWarpgroupThreads * (kIsPingpong ? 1 : kConsumerWarpgroups);
  static constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;

  using TileShape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using ClusterShape = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;

  // Rows of one instruction are 64; in a cooperative tile neighbouring 64-row blocks belong to different
  // warpgroups.
  static constexpr int kAtomRows = 64;
  static constexpr int kAtomsPerWarpgroup = kTileM / kAtomRows / (kIsPingpong ? 1 : 2);

  using KernelSchedule = std::conditional_t<kIsPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                            cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, TileShape, cute::GMMA::Major::K,
                                 cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::Int<kIsPingpong ? 1 : 2>, cute::_1, cute::_1>>{}));
  using SmemAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using StrideRowMajor = cute::Stride<std::int64_t, cute::_1, std::int64_t>;
  // A block shares its rows of A with the blocks beside it in n, its rows of B with those beside it in m.
  using CopyA = std::conditional_t<(kClusterN > 1), cute::SM90_TMA_LOAD_MULTICAST, cute::SM90_TMA_LOAD>;
  using CopyB = std::conditional_t<(kClusterM > 1), cute::SM90_TMA_LOAD_MULTICAST, cute::SM90_TMA_LOAD>;

  using Mainloop = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, ClusterShape, KernelSchedule>, TileShape,
      Element, StrideRowMajor, Element, StrideRowMajor, TiledMma, CopyA, SmemAtom, void, cute::identity,
      CopyB, SmemAtom, void, cute::identity>;

  static_assert(kTileN % 64 == 0 && kTileM % (kIsPingpong ? 64 : 128) == 0);
  static_assert(kAtomsPerWarpgroup * kTileN <= 384, "at most 192 accumulators a thread");
};

}  // namespace flashoverlap::cuda::sm90
