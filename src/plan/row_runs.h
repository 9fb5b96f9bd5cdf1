#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/plan.h"

namespace flashoverlap::plan {

/// Rows [first, first + count) of A.
struct RowRun {
  std::int64_t first = 0;
  std::int64_t count = 0;
  bool operator==(const RowRun&) const = default;
};

/// The runs of rows of A that rows of tiles read, in the order in which the schedule comes to them: what
/// Operands::make_rows is called for.
class RowRuns {
 public:
  RowRuns() = default;  ///< None.
  /// Throws Error(kUnsupported) where two tiles read some rows in common and others not.
  explicit RowRuns(const OverlapPlan& plan);

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(runs_.size()); }
  [[nodiscard]] const RowRun& at(std::int64_t run) const { return runs_[static_cast<std::size_t>(run)]; }
  [[nodiscard]] std::int64_t of_tile(std::int64_t tile) const {
    return of_tile_[static_cast<std::size_t>(tile)];
  }

 private:
  std::vector<RowRun> runs_;
  std::vector<std::int64_t> of_tile_;
};

}  // namespace flashoverlap::plan
