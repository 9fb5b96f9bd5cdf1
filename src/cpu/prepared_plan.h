#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu/workspace.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::cpu {

/// Elements [begin, end) of the main loop.
struct LoopRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// A verified plan with the tables that a run looks things up in: O(tiles).
class CpuPreparedPlan final : public PreparedPlan {
 public:
  /// Throws Error(kBadArgument) with verify's reason, or Error(kUnsupported).
  explicit CpuPreparedPlan(OverlapPlan plan);

  [[nodiscard]] const OverlapPlan& plan() const override { return plan_; }
  /// "gemm-all-reduce m=… n=… k=… f32": what error messages and communication calls say.
  [[nodiscard]] const std::string& label() const { return label_; }

  [[nodiscard]] std::int64_t group_at(std::int64_t position) const {
    return group_at_[static_cast<std::size_t>(position)];
  }
  [[nodiscard]] std::span<const Gate> gates_of(std::int64_t tile) const;
  /// Passes over the schedule, each a part of the main loop.
  [[nodiscard]] std::int64_t num_passes() const { return std::ssize(passes_); }
  [[nodiscard]] LoopRange pass(std::int64_t number) const;
  [[nodiscard]] LoopRange whole_loop() const { return {0, plan_.grid.k()}; }
  /// True when partial sums must be kept between passes elsewhere than at the tile's place.
  [[nodiscard]] bool keeps_partial_sums() const { return keeps_partial_sums_; }
  /// Where a tile's are, in elements of float32.
  [[nodiscard]] std::int64_t partial_offset(std::int64_t tile) const {
    return partial_offset_[static_cast<std::size_t>(tile)];
  }
  /// The plan's channels, ascending; each has a stream of its own.
  [[nodiscard]] const std::vector<std::int32_t>& channels() const { return channels_; }
  /// Index in `channels` of a transfer's channel.
  [[nodiscard]] std::size_t stream_of(std::int64_t transfer) const {
    return stream_of_[static_cast<std::size_t>(transfer)];
  }
  /// True when ranks write into each other's memory: all of them, or none.
  [[nodiscard]] bool has_puts() const { return has_puts_; }
  /// True when a transfer moves the caller's output itself, which must be dense then.
  [[nodiscard]] bool moves_output() const { return moves_output_; }
  /// True when a transfer reads A or writes into it: it must be dense then.
  [[nodiscard]] bool moves_input() const { return moves_input_; }
  /// True when slices arrive in A.
  [[nodiscard]] bool receives_input() const { return receives_input_; }
  /// True when slices arrive in B, which must be dense then.
  [[nodiscard]] bool moves_weight() const { return moves_weight_; }
  [[nodiscard]] std::int64_t num_weights() const { return num_weights_; }
  [[nodiscard]] std::int64_t max_tile_rows() const { return max_tile_rows_; }
  [[nodiscard]] std::int64_t max_tile_cols() const { return max_tile_cols_; }
  [[nodiscard]] Workspace::Need workspace_need() const;

 private:
  void index_tiles();
  void index_passes();
  void index_transfers();

  OverlapPlan plan_;
  std::string label_;
  std::vector<std::int32_t> group_at_;
  std::vector<std::int64_t> first_gate_;  // size tiles + 1
  std::vector<std::int64_t> passes_;      // where they begin
  bool keeps_partial_sums_ = false;
  std::vector<std::int64_t> partial_offset_;  // by tile, and the end; empty where none are kept
  std::vector<std::int32_t> channels_;
  std::vector<std::size_t> stream_of_;  // by transfer
  bool has_puts_ = false;
  bool moves_output_ = false;
  bool moves_input_ = false;
  bool receives_input_ = false;
  bool moves_weight_ = false;
  std::int64_t num_weights_ = 1;
  std::int64_t max_tile_rows_ = 0;
  std::int64_t max_tile_cols_ = 0;
};

}  // namespace flashoverlap::cpu
