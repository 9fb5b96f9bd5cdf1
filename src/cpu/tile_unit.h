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

  /// Computes and stores in one go, with `finish(accumulator)` in between: the tile as dense float32, to be
  /// added to. An empty `finish` lets float32 tiles be written without a copy. The bits stored do not depend
  /// on the target.
  template <typename Finish>
  void run(const Tile& tile, const TileInputs& inputs, const TileTarget& target, bool has_finish,
           const Finish& finish) {
    if (!has_finish && write_directly(tile, inputs, target)) return;
    multiply(tile, inputs);
    if (has_finish) finish(accumulator_);
    store(tile, target);
  }

  [[nodiscard]] float* row_scratch() const { return row_; }

 private:
  bool write_directly(const Tile& tile, const TileInputs& inputs, const TileTarget& target) const;
  void multiply(const Tile& tile, const TileInputs& inputs) const;
  void multiply_16_bit(const Tile& tile, const std::byte* a, std::int64_t lda, const std::byte* b,
                       std::int64_t ldb) const;
  void store(const Tile& tile, const TileTarget& target) const;
  [[nodiscard]] const std::byte* a_of(const Tile& tile, const TileInputs& inputs) const;
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
