#include "cpu/prepared_plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/fail.h"
#include "cpu/blas.h"

namespace flashoverlap::cpu {
namespace {

// A stream is a thread: a plan that asks for more is more likely broken than right.
constexpr std::int32_t kMaxChannels = 64;

void check_supported(const OverlapPlan& plan, const std::string& label) {
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    const Transfer& transfer = plan.transfers[i];
    if (transfer.channel < 0 || transfer.channel >= kMaxChannels) {
      core::fail(ErrorKind::kUnsupported,
                 "transfer {} of {} is on channel {}; the CPU executor has channels 0 to {}", i, label,
                 transfer.channel, kMaxChannels - 1);
    }
  }
  if (plan.restore.source == BufferKind::kOutput && !plan.restore.bands.empty()) {
    core::fail(ErrorKind::kUnsupported,
               "{} restores from the output to the output; that cannot be done in place", label);
  }
  const std::int64_t largest = std::max({plan.grid.k(), plan.grid.cols(), plan.output_cols});
  if (largest > kMaxBlasSize) {
    core::fail(ErrorKind::kUnsupported, "{} has a row of {} elements; the matrix library takes at most {}",
               label, largest, kMaxBlasSize);
  }
}

}  // namespace

CpuPreparedPlan::CpuPreparedPlan(OverlapPlan plan) : plan_(std::move(plan)) {
  if (const Verdict verdict = verify(plan_); !verdict) {
    core::fail(ErrorKind::kBadArgument, "plan of {} does not hold: {}", plan_.operation, verdict.reason);
  }
  label_ = fmt::format("{} m={} n={} k={} {}", plan_.operation, plan_.grid.rows(), plan_.grid.cols(),
                       plan_.grid.k(), name_of(plan_.dtype));
  check_supported(plan_, label_);
  index_tiles();
  index_transfers();
}

void CpuPreparedPlan::index_tiles() {
  group_at_.resize(plan_.schedule.size());
  for (std::size_t group = 0; group < plan_.groups.size(); ++group) {
    const auto begin = group_at_.begin() + plan_.groups[group].first_position;
    std::fill(begin, begin + plan_.groups[group].num_tiles, static_cast<std::int32_t>(group));
  }
  first_gate_.assign(static_cast<std::size_t>(plan_.grid.num_tiles()) + 1, 0);
  for (const Gate& gate : plan_.gates) ++first_gate_[static_cast<std::size_t>(gate.tile) + 1];
  for (std::size_t tile = 1; tile < first_gate_.size(); ++tile) first_gate_[tile] += first_gate_[tile - 1];
  for (const Tile& tile : plan_.grid.tiles()) {
    max_tile_rows_ = std::max(max_tile_rows_, tile.rows);
    max_tile_cols_ = std::max(max_tile_cols_, tile.cols);
  }
  for (const Problem& problem : plan_.grid.problems())
    num_weights_ = std::max(num_weights_, problem.weight + 1);
}

void CpuPreparedPlan::index_transfers() {
  for (const Transfer& transfer : plan_.transfers) {
    num_channels_ = std::max(num_channels_, transfer.channel + 1);
    has_puts_ |= transfer.kind == TransferKind::kPut;
    for (const Region* region : {&transfer.source, &transfer.destination}) {
      if (region->count == 0) continue;
      moves_output_ |= region->buffer == BufferKind::kOutput;
      moves_input_ |= region->buffer == BufferKind::kInput;
      moves_weight_ |= region->buffer == BufferKind::kWeight;
    }
  }
}

std::span<const Gate> CpuPreparedPlan::gates_of(std::int64_t tile) const {
  const auto begin = static_cast<std::size_t>(first_gate_[static_cast<std::size_t>(tile)]);
  const auto end = static_cast<std::size_t>(first_gate_[static_cast<std::size_t>(tile) + 1]);
  return std::span(plan_.gates).subspan(begin, end - begin);
}

Workspace::Need CpuPreparedPlan::workspace_need() const {
  const std::int64_t element = size_of(plan_.dtype);
  return {.packed = plan_.packed_size * element, .received = plan_.received_size * element, .staged = 0};
}

}  // namespace flashoverlap::cpu
