// An OverlapPlan on the device: schedule, placement, counters and restore as the tables that the kernels
// read.
#pragma once

#include <cstdint>
#include <vector>

#include "counter_table.h"
#include "device.h"
#include "flashoverlap/plan.h"
#include "restore.h"
#include "signal_gemm.h"
#include "tile_work.h"

namespace flashoverlap::cuda {

/// The tables on the host: what DevicePlan copies. Made without a device, so that it is tested everywhere.
struct HostTables {
  std::vector<TileWork> schedule;
  std::vector<TileWork> plain_schedule;  ///< The same tiles, each in its place of the product, not counted.
  std::vector<std::int64_t> row_offsets;
  std::vector<std::int32_t> slab_rows_of;
  std::int32_t slab_rows = 0;
  std::vector<std::int64_t> group_tiles;  ///< tiles of each group
  std::vector<DeviceRow> rows;
  std::vector<DevicePiece> pieces;
  std::int32_t piece_cols = 0;
  bool is_restore_aligned = false;
};

/// Throws Error(kUnsupported) for sizes beyond 2^31 - 1 rows or columns, and Error(kBadArgument) where the
/// plan's tiles are larger than 32767. Gates are another table (arrivals.h). The first `begun` tiles come
/// twice in `schedule`: see SignalGemmArguments.
[[nodiscard]] HostTables make_host_tables(const OverlapPlan& plan, std::int64_t begun = 0);

/// The tables of one plan on a device, with the counting table of its groups.
class DevicePlan {
 public:
  /// The plan's tile size must be the variant's. Copies synchronously. Throws as make_host_tables, and
  /// Error(kBadArgument) on another tile size, Error(kOutOfMemory), Error(kDevice).
  DevicePlan(int device, const OverlapPlan& plan, const SignalGemmVariant& variant, std::int64_t begun = 0);

  /// Tiles through placement, counted.
  [[nodiscard]] const DeviceTables& tables() const { return tables_; }
  /// The same tiles in the same order, each stored in its place of a row-major [m, n] matrix, not counted.
  [[nodiscard]] const DeviceTables& plain_tables() const { return plain_tables_; }
  [[nodiscard]] const DeviceRestore& restore() const { return restore_; }
  /// One counter per group, 0 outside of launches; see WaitParams for who writes and resets it.
  [[nodiscard]] std::uint32_t* counters() const { return counters_.data(); }
  [[nodiscard]] std::uint32_t* counter(std::int64_t group) const { return counters() + group; }
  /// The value at which `group` is complete; 0 for an empty group.
  [[nodiscard]] std::uint32_t target(std::int64_t group) const {
    return targets_[static_cast<std::size_t>(group)];
  }
  /// Enqueues the clearing of all counters: needed after a time-out, an abort, or a launch whose groups
  /// nobody waited for.
  void reset_counters(cudaStream_t stream) const;

 private:
  DeviceBuffer schedule_;
  DeviceBuffer plain_schedule_;
  DeviceBuffer row_offsets_;
  DeviceBuffer slab_rows_of_;
  CounterTable counters_;
  DeviceBuffer rows_;
  DeviceBuffer pieces_;
  std::vector<std::uint32_t> targets_;
  DeviceTables tables_;
  DeviceTables plain_tables_;
  DeviceRestore restore_;
};

}  // namespace flashoverlap::cuda
