// The signal GEMM: D = A · Bᵀ whose tiles are computed in schedule order, stored through placement, and
// counted.
//
// Source: arXiv 2504.19519 (FlashOverlap), sections 3.2 and 3.3. We differ in that the kernel is persistent
// and walks an explicit schedule, so the wave of a tile is known without a profiling run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "finish.h"
#include "tile_work.h"

namespace flashoverlap::cuda {

enum class GemmType : std::uint8_t { kBf16, kFp16 };

/// Columns [k_begin, k_begin + depth) of A as a matrix of their own, [m, depth] and dense.
struct OperandBlock {
  const void* a = nullptr;
  int k_begin = 0;
  int depth = 0;  ///< >= 1
};

/// Arguments of one signal GEMM. All pointers are to memory of the current device.
struct SignalGemmArguments {
  int m = 0;                     ///< rows of A, >= 1
  int n = 0;                     ///< rows of B, >= 1
  int k = 0;                     ///< columns of A and B, >= 1
  const void* a = nullptr;       ///< [m, k] row-major
  std::int64_t lda = 0;          ///< elements from row to row of A, >= k
  const void* b = nullptr;       ///< [num_weights * n, k] row-major
  int num_weights = 1;           ///< matrices stacked in B; a tile says which it multiplies with
  std::int64_t ldb = 0;          ///< elements from row to row of B, >= k
  void* packed = nullptr;        ///< the packed send buffer; may be null where no tile is placed in it
  std::int64_t packed_size = 0;  ///< its elements
  void* output = nullptr;        ///< D, row-major, for tiles stored in place; may be null where there is none
  int output_rows = 0;           ///< of D; 0: m
  int output_cols = 0;           ///< of D; 0: n
  std::int64_t ldd = 0;          ///< elements from row to row of D, >= its columns
  DeviceTables tables;  ///< made for this variant's tile shape; uploaded before the launch is enqueued
  std::uint32_t* counters = nullptr;  ///< one per group, zero before the launch; null: no signals
  /// In the order in which the main loop takes them; each column is in one. Empty: A is one matrix, else `a`
  /// and `lda` are not looked at, there are no signals, and `gates` has one for each block.
  std::vector<OperandBlock> blocks = {};
  /// With blocks: the first `begun` positions compute the first block's product alone, and the same tiles
  /// come again in the `begun` positions after them. A multiple of the variant's `walk` times the grid's
  /// units.
  int begun = 0;
  void* sums = nullptr;  ///< With begun > 0: begun * tile_rows * tile_cols float32, 16-byte aligned
  DeviceGates gates;     ///< What tiles wait for before they load operands; needed == null: nothing
  DeviceFinish
      finish;  ///< What they add before they are stored; gates.needed == null: nothing. Not with `gates`.
  int num_sms = 0;  ///< SMs to use; the grid has as many blocks, rounded down to whole clusters
};

/// A launch with its descriptors made: pointers, shape and tables are fixed, the data may change from launch
/// to launch.
class PreparedGemm {
 public:
  virtual ~PreparedGemm() = default;
  /// Enqueues the kernel; returns at once. Can be captured in a CUDA graph. Throws Error on a launch failure.
  virtual void launch(cudaStream_t stream) const = 0;
};

/// One compiled kernel.
struct SignalGemmVariant {
  const char* name;  ///< e.g. "sm90_cooperative_128x256x64_2x1_bf16"
  GemmType type;
  int min_compute_capability;  ///< 90 or 80
  bool exact_capability;       ///< runs on exactly this compute capability (sm_90a)
  int tile_rows;               ///< of a plan tile
  int tile_cols;
  int tile_k;
  int blocks_per_tile;   ///< SMs of one compute unit: units = num_sms / blocks_per_tile
  int signals_per_tile;  ///< a group of t tiles is complete when its counter has reached t * signals_per_tile
  int walk;              ///< tiles that a unit works on at a time, in turn; 0: tiles cannot be begun
  int operand_alignment;  ///< elements: a, b, lda and ldb must be multiples
  /// Time on one unit: relative_time * (k + overhead_k) * area of a block's part of the tile, on a scale of
  /// its own; what a tile costs besides its products counts as overhead_k more columns. Fitted to an H200
  /// (docs/gpu-measurements.md).
  double relative_time;
  int overhead_k;
  /// Checks the arguments and makes the descriptors. Throws Error where the variant cannot run them.
  std::unique_ptr<PreparedGemm> (*prepare)(const SignalGemmArguments&);
  /// Loads the kernel on the current device, so that no later launch waits for that behind a waiting stream.
  void (*load)();
};

/// Whether A, or each of its blocks, and B lie as a kernel with this `operand_alignment` needs them.
bool are_operands_aligned(const SignalGemmArguments& arguments, int operand_alignment);

/// All variants compiled in.
std::span<const SignalGemmVariant* const> signal_gemm_variants();

}  // namespace flashoverlap::cuda
