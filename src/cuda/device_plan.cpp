#include "device_plan.h"

#include <string>

#include "check.h"
#include "flashoverlap/error.h"

namespace flashoverlap::cuda {
namespace {

void check_tile(const OverlapPlan& plan, const SignalGemmVariant& variant) {
  if (plan.grid.tile_m() == variant.tile_rows && plan.grid.tile_n() == variant.tile_cols) return;
  throw Error(ErrorKind::kBadArgument, "CUDA: plan with tiles of " + std::to_string(plan.grid.tile_m()) +
                                           " x " + std::to_string(plan.grid.tile_n()) + ", but " +
                                           variant.name + " computes " + std::to_string(variant.tile_rows) +
                                           " x " + std::to_string(variant.tile_cols));
}

template <class T>
DeviceBuffer upload_table(int device, const std::vector<T>& host) {
  const auto bytes = static_cast<std::int64_t>(host.size() * sizeof(T));
  DeviceBuffer buffer(device, bytes, "plan tables");
  if (bytes > 0) upload(device, buffer.data(), host.data(), static_cast<std::size_t>(bytes));
  return buffer;
}

template <class T>
const T* data_of(const DeviceBuffer& buffer) {
  return static_cast<const T*>(buffer.data());
}

}  // namespace

DevicePlan::DevicePlan(int device, const OverlapPlan& plan, const SignalGemmVariant& variant,
                       std::int64_t begun) {
  check_tile(plan, variant);
  const HostTables host = make_host_tables(plan, begun);
  schedule_ = upload_table(device, host.schedule);
  plain_schedule_ = upload_table(device, host.plain_schedule);
  row_offsets_ = upload_table(device, host.row_offsets);
  slab_rows_of_ = upload_table(device, host.slab_rows_of);
  counters_ = CounterTable(device, static_cast<std::int64_t>(host.group_tiles.size()));
  rows_ = upload_table(device, host.rows);
  pieces_ = upload_table(device, host.pieces);
  for (const std::int64_t tiles : host.group_tiles) {
    targets_.push_back(static_cast<std::uint32_t>(tiles * variant.signals_per_tile));
  }
  tables_ = {.schedule = data_of<TileWork>(schedule_),
             .num_positions = static_cast<std::int32_t>(host.schedule.size()),
             .row_offsets = data_of<std::int64_t>(row_offsets_),
             .slab_rows_of = data_of<std::int32_t>(slab_rows_of_),
             .slab_rows = host.slab_rows};
  plain_tables_.schedule = data_of<TileWork>(plain_schedule_);
  plain_tables_.num_positions = static_cast<std::int32_t>(host.plain_schedule.size());
  restore_ = {.rows = data_of<DeviceRow>(rows_),
              .pieces = data_of<DevicePiece>(pieces_),
              .piece_cols = host.piece_cols,
              .is_aligned = host.is_restore_aligned};
}

void DevicePlan::reset_counters(cudaStream_t stream) const {
  if (targets_.empty()) return;
  FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(counters(), 0, targets_.size() * sizeof(std::uint32_t), stream));
}

}  // namespace flashoverlap::cuda
