#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/prepared_plan.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::cpu {

/// The matrices that tiles read, as bytes of the plan's element type.
struct TileInputs {
  const std::byte* a = nullptr;
  std::int64_t lda = 0;
  const std::byte* b = nullptr;
  std::int64_t ldb = 0;
  const std::byte* received = nullptr;  ///< Where a plan's input blocks may lie, too.
};

/// A pass over one tile.
struct TilePass {
  LoopRange loop;
  /// The tile's dense float32 sum, kept from pass to pass; null: there is only one, or it is kept where the
  /// tile goes.
  float* sum = nullptr;
};

/// Where a finished tile goes: to its segments of the packed buffer, or, without segments, to its place in a
/// matrix.
struct TileTarget {
  std::span<const PlacementSegment> segments;
  std::byte* packed = nullptr;
  std::byte* matrix = nullptr;
  std::int64_t ld = 0;
  std::int64_t row_shift = 0;  ///< Of the matrix against the product.
  std::int64_t col_shift = 0;
  /// Address of an element of the product in the matrix.
  [[nodiscard]] std::byte* at(std::int64_t row, std::int64_t col, std::int64_t element_bytes) const {
    return matrix + ((row + row_shift) * ld + col + col_shift) * element_bytes;
  }
};

/// Computes tiles on one thread, in scratch memory of its own.
class TileUnit {
 public:
  /// Bytes of scratch that one thread needs for any tile of this plan, and for a row of its output. A whole
  /// number of pages.
  static std::int64_t scratch_bytes(const CpuPreparedPlan& prepared);

  TileUnit(const CpuPreparedPlan& prepared, std::byte* scratch);

  /// Computes and, in the last pass, stores, with `finish(accumulator)` in between: the tile as dense
  /// float32, to be added to. An empty `finish` lets float32 tiles be written without a copy. The bits stored
  /// do not depend on the target, nor on how many passes there are where all end at input blocks.
  template <typename Finish>
  void run(const Tile& tile, const TileInputs& inputs, const TilePass& pass, const TileTarget& target,
           bool has_finish, const Finish& finish) {
    if (!has_finish && write_directly(tile, inputs, pass.loop, target)) return;
    float* sum = pass.sum == nullptr ? accumulator_ : pass.sum;
    multiply(tile, inputs, pass.loop, sum);
    if (pass.loop.end < plan_.grid.k()) return;
    if (has_finish) finish(sum);
    store(tile, target, sum);
  }
  /// In one pass.
  template <typename Finish>
  void run(const Tile& tile, const TileInputs& inputs, const TileTarget& target, bool has_finish,
           const Finish& finish) {
    run(tile, inputs, TilePass{.loop = {0, plan_.grid.k()}}, target, has_finish, finish);
  }

  [[nodiscard]] float* row_scratch() const { return row_; }

 private:
  /// A part of the main loop whose columns of A lie side by side. Not the first: it is added.
  struct LoopPiece {
    const std::byte* a;
    std::int64_t lda;
    const std::byte* b;
    std::int64_t ldb;
    std::int64_t depth;
    bool is_first;
  };
  template <typename Visit>
  void for_each_piece(const Tile& tile, const TileInputs& inputs, const LoopRange& loop,
                      const Visit& visit) const;
  bool write_directly(const Tile& tile, const TileInputs& inputs, const LoopRange& loop,
                      const TileTarget& target) const;
  void multiply(const Tile& tile, const TileInputs& inputs, const LoopRange& loop, float* sum) const;
  void multiply_16_bit(const Tile& tile, const LoopPiece& piece, float* sum) const;
  void store(const Tile& tile, const TileTarget& target, const float* sum) const;
  [[nodiscard]] const std::byte* b_of(const Tile& tile, const TileInputs& inputs) const;

  const OverlapPlan& plan_;
  std::int64_t element_;
  std::int64_t weight_rows_;  // rows of one B of the stack
  float* accumulator_;        // [tile rows, tile cols], dense
  float* a_block_;            // [tile rows, kDepthBlock]: 16-bit types only
  float* b_block_;            // [tile cols, kDepthBlock]
  float* row_;                // [output cols]
};

}  // namespace flashoverlap::cpu
