#include "cpu/restore_pass.h"

#include <algorithm>
#include <cstring>

#include "core/half.h"

namespace flashoverlap::cpu {
namespace {

// Large enough that taking rows costs nothing, small enough that threads finish together.
constexpr std::int64_t kStepBytes = 64 * 1024;

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

RestorePass::RestorePass(const OverlapPlan& plan, const RowEpilogue& epilogue, const Buffers& buffers)
    : plan_(plan), epilogue_(epilogue), buffers_(buffers), element_(size_of(plan.dtype)) {
  const std::int64_t row_bytes = std::max<std::int64_t>(1, plan.output_cols * element_);
  rows_per_step_ = std::max<std::int64_t>(1, kStepBytes / row_bytes);
  is_in_place_ = buffers.product == buffers.out && epilogue.identity();
  needed_ = plan.output_rows > 0 && plan.output_cols > 0 && !(plan.restore.bands.empty() && is_in_place_);
}

void RestorePass::work(float* row_scratch) {
  const auto& bands = plan_.restore.bands;
  while (true) {
    const std::int64_t begin = next_row_.fetch_add(rows_per_step_, std::memory_order_relaxed);
    if (begin >= plan_.output_rows) return;
    const std::int64_t end = std::min(begin + rows_per_step_, plan_.output_rows);
    std::size_t band = band_of(begin);
    for (std::int64_t row = begin; row < end; ++row) {
      while (band < bands.size() && row >= bands[band].row_begin + bands[band].rows) ++band;
      const bool is_restored = band < bands.size() && row >= bands[band].row_begin;
      finish_row(row, is_restored ? &bands[band] : nullptr, row_scratch);
    }
  }
}

std::size_t RestorePass::band_of(std::int64_t row) const {
  const auto& bands = plan_.restore.bands;
  const auto after = std::upper_bound(
      bands.begin(), bands.end(), row,
      [](std::int64_t value, const RestoreBand& band) { return value < band.row_begin + band.rows; });
  return static_cast<std::size_t>(after - bands.begin());
}

void RestorePass::finish_row(std::int64_t row, const RestoreBand* band, float* row_scratch) const {
  if (band == nullptr && is_in_place_) return;
  std::byte* out = buffers_.out + row * buffers_.ldo * element_;
  const std::int64_t cols = plan_.output_cols;
  if (epilogue_.identity()) {
    if (band != nullptr) {
      copy_pieces(*band, row - band->row_begin, out);
    } else {
      copy_bytes(out, buffers_.product + row * buffers_.product_ld * element_, cols * element_);
    }
    return;
  }
  if (band != nullptr) {
    gather_pieces(*band, row - band->row_begin, row_scratch);
  } else {
    core::to_float(buffers_.product + row * buffers_.product_ld * element_, plan_.dtype, row_scratch, cols);
  }
  epilogue_.apply(row, row_scratch, out);
}

void RestorePass::copy_pieces(const RestoreBand& band, std::int64_t row_in_band, std::byte* out) const {
  for (const RestorePiece& piece : plan_.restore.of_band(band)) {
    const std::byte* from = buffers_.source + (piece.offset + row_in_band * piece.cols) * element_;
    copy_bytes(out + piece.col_begin * element_, from, piece.cols * element_);
  }
}

void RestorePass::gather_pieces(const RestoreBand& band, std::int64_t row_in_band, float* values) const {
  for (const RestorePiece& piece : plan_.restore.of_band(band)) {
    const std::byte* from = buffers_.source + (piece.offset + row_in_band * piece.cols) * element_;
    core::to_float(from, plan_.dtype, values + piece.col_begin, piece.cols);
  }
}

}  // namespace flashoverlap::cpu
