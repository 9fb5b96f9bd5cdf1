#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cpu/epilogue.h"
#include "flashoverlap/plan.h"

namespace flashoverlap::cpu {

/// The one pass over memory after the transfers: puts every row into its place in the output and finishes it.
/// Several threads call `work` on the same object.
class RestorePass {
 public:
  /// Rows of a band come from `source` (packed or received buffer), others from the matrix `product` with
  /// leading dimension `product_ld`, which may be the output itself.
  struct Buffers {
    const std::byte* source = nullptr;
    const std::byte* product = nullptr;
    std::int64_t product_ld = 0;
    std::byte* out = nullptr;
    std::int64_t ldo = 0;
  };
  RestorePass(const OverlapPlan& plan, const RowEpilogue& epilogue, const Buffers& buffers);

  /// False when every row is in its place and finished already.
  [[nodiscard]] bool needed() const { return needed_; }
  /// Takes rows until none is left. `row_scratch`: a row of floats of this thread's own.
  void work(float* row_scratch);

 private:
  void finish_row(std::int64_t row, const RestoreBand* band, float* row_scratch) const;
  void copy_pieces(const RestoreBand& band, std::int64_t row_in_band, std::byte* out) const;
  void gather_pieces(const RestoreBand& band, std::int64_t row_in_band, float* values) const;
  [[nodiscard]] std::size_t band_of(std::int64_t row) const;

  const OverlapPlan& plan_;
  const RowEpilogue& epilogue_;
  Buffers buffers_;
  std::int64_t element_;
  std::int64_t rows_per_step_;
  bool is_in_place_;  ///< Rows without a band are where they belong, and finished.
  bool needed_;
  std::atomic<std::int64_t> next_row_{0};
};

}  // namespace flashoverlap::cpu
