#include "cpu/tile_unit.h"

#include <algorithm>

#include "core/half.h"
#include "cpu/blas.h"

namespace flashoverlap::cpu {
namespace {

// Columns of A and B that are converted at a time for 16-bit types: with 128 x 128 tiles both blocks stay in
// a second-level cache of 512 KiB, and a product still runs long enough to amortise the library's own
// packing.
constexpr std::int64_t kDepthBlock = 384;
constexpr std::int64_t kPageBytes = 4096;

struct ScratchLayout {
  std::int64_t accumulator = 0;
  std::int64_t a_block = 0;
  std::int64_t b_block = 0;
  std::int64_t row = 0;
};

// In floats, each part a whole number of cache lines.
ScratchLayout layout_of(const CpuPreparedPlan& prepared) {
  const auto padded = [](std::int64_t floats) { return (floats + 15) / 16 * 16; };
  const bool converts = prepared.plan().dtype != DType::kFloat32;
  const std::int64_t depth = converts ? std::min(kDepthBlock, prepared.plan().grid.k()) : 0;
  return {.accumulator = padded(prepared.max_tile_rows() * prepared.max_tile_cols()),
          .a_block = padded(prepared.max_tile_rows() * depth),
          .b_block = padded(prepared.max_tile_cols() * depth),
          .row = padded(prepared.plan().output_cols)};
}

}  // namespace

std::int64_t TileUnit::scratch_bytes(const CpuPreparedPlan& prepared) {
  const ScratchLayout layout = layout_of(prepared);
  const auto floats = layout.accumulator + layout.a_block + layout.b_block + layout.row;
  const auto bytes = floats * static_cast<std::int64_t>(sizeof(float));
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

TileUnit::TileUnit(const CpuPreparedPlan& prepared, std::byte* scratch)
    : plan_(prepared.plan()), element_(size_of(plan_.dtype)), weight_rows_(plan_.grid.cols()) {
  const ScratchLayout layout = layout_of(prepared);
  accumulator_ = reinterpret_cast<float*>(scratch);
  a_block_ = accumulator_ + layout.accumulator;
  b_block_ = a_block_ + layout.a_block;
  row_ = b_block_ + layout.b_block;
}

const std::byte* TileUnit::b_of(const Tile& tile, const TileInputs& inputs) const {
  const std::int64_t weight = plan_.grid.problems()[static_cast<std::size_t>(tile.problem)].weight;
  return inputs.b + (weight * weight_rows_ + tile.col_begin) * inputs.ldb * element_;
}

template <typename Visit>
void TileUnit::for_each_piece(const Tile& tile, const TileInputs& inputs, const LoopRange& loop,
                              const Visit& visit) const {
  const std::byte* b = b_of(tile, inputs);
  if (plan_.input_blocks.empty()) {
    const std::byte* a = inputs.a + (tile.row_begin * inputs.lda + loop.begin) * element_;
    visit(LoopPiece{a, inputs.lda, b + loop.begin * element_, inputs.ldb, loop.end - loop.begin,
                    loop.begin == 0});
    return;
  }
  std::int64_t block_begin = 0;  // along the main loop
  for (const InputBlock& block : plan_.input_blocks) {
    const std::int64_t begin = std::max(loop.begin, block_begin);
    const std::int64_t end = std::min(loop.end, block_begin + block.depth);
    const std::int64_t skipped = begin - block_begin;
    block_begin += block.depth;
    if (begin >= end) continue;
    const std::byte* base = block.buffer == BufferKind::kReceived ? inputs.received : inputs.a;
    visit(LoopPiece{base + (block.offset + tile.row_begin * block.depth + skipped) * element_, block.depth,
                    b + (block.k_begin + skipped) * element_, inputs.ldb, end - begin, begin == 0});
  }
}

bool TileUnit::write_directly(const Tile& tile, const TileInputs& inputs, const LoopRange& loop,
                              const TileTarget& target) const {
  if (plan_.dtype != DType::kFloat32 || target.segments.size() > 1) return false;
  std::byte* to = nullptr;
  std::int64_t ld = 0;
  if (target.segments.empty()) {
    to = target.at(tile.row_begin, tile.col_begin, element_);
    ld = target.ld;
  } else {
    const PlacementSegment& segment = target.segments.front();
    if (segment.row_begin != 0 || segment.rows != tile.rows) return false;
    to = target.packed + segment.offset * element_;
    ld = tile.cols;
  }
  for_each_piece(tile, inputs, loop, [&](const LoopPiece& piece) {
    gemm(tile.rows, tile.cols, piece.depth, reinterpret_cast<const float*>(piece.a), piece.lda,
         reinterpret_cast<const float*>(piece.b), piece.ldb, !piece.is_first, reinterpret_cast<float*>(to),
         ld);
  });
  return true;
}

void TileUnit::multiply(const Tile& tile, const TileInputs& inputs, const LoopRange& loop, float* sum) const {
  for_each_piece(tile, inputs, loop, [&](const LoopPiece& piece) {
    if (plan_.dtype != DType::kFloat32) return multiply_16_bit(tile, piece, sum);
    gemm(tile.rows, tile.cols, piece.depth, reinterpret_cast<const float*>(piece.a), piece.lda,
         reinterpret_cast<const float*>(piece.b), piece.ldb, !piece.is_first, sum, tile.cols);
  });
}

void TileUnit::multiply_16_bit(const Tile& tile, const LoopPiece& piece, float* sum) const {
  if (piece.depth == 0 && piece.is_first) std::fill_n(sum, tile.size(), 0.0F);
  for (std::int64_t begin = 0; begin < piece.depth; begin += kDepthBlock) {
    const std::int64_t depth = std::min(kDepthBlock, piece.depth - begin);
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      core::to_float(piece.a + (row * piece.lda + begin) * element_, plan_.dtype, a_block_ + row * depth,
                     depth);
    }
    for (std::int64_t row = 0; row < tile.cols; ++row) {
      core::to_float(piece.b + (row * piece.ldb + begin) * element_, plan_.dtype, b_block_ + row * depth,
                     depth);
    }
    gemm(tile.rows, tile.cols, depth, a_block_, depth, b_block_, depth, !piece.is_first || begin > 0, sum,
         tile.cols);
  }
}

void TileUnit::store(const Tile& tile, const TileTarget& target, const float* sum) const {
  for (const PlacementSegment& segment : target.segments) {
    core::from_float(sum + segment.row_begin * tile.cols, plan_.dtype,
                     target.packed + segment.offset * element_, segment.rows * tile.cols);
  }
  if (!target.segments.empty()) return;
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    std::byte* to = target.at(tile.row_begin + row, tile.col_begin, element_);
    core::from_float(sum + row * tile.cols, plan_.dtype, to, tile.cols);
  }
}

}  // namespace flashoverlap::cpu
