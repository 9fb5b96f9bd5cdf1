#include "cpu/prepared_plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/fail.h"
#include "cpu/blas.h"

namespace flashoverlap::cpu {
namespace {

// A stream is a thread: a plan that asks for more is more likely broken than right.
constexpr std::int64_t kMaxChannels = 128;

void check_supported(const OverlapPlan& plan, const std::string& label) {
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
  index_passes();
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

void CpuPreparedPlan::index_passes() {
  passes_ = plan_.passes();
  if (num_passes() == 1) return;
  const bool adds =
      std::ranges::any_of(plan_.gates, [](const Gate& gate) { return gate.point == GatePoint::kFinish; });
  bool scatters = false;
  for (std::int64_t t = 0; t < plan_.grid.num_tiles(); ++t) {
    scatters |= plan_.placement.of_tile(t).size() > 1;
  }
  // Otherwise tiles are dense float32 where they go, and summed up there.
  keeps_partial_sums_ = plan_.dtype != DType::kFloat32 || adds || scatters;
  if (!keeps_partial_sums_) return;
  std::int64_t offset = 0;
  for (const Tile& tile : plan_.grid.tiles()) {
    partial_offset_.push_back(offset);
    offset += tile.size();
  }
  partial_offset_.push_back(offset);
}

LoopRange CpuPreparedPlan::pass(std::int64_t number) const {
  const auto at = static_cast<std::size_t>(number);
  return {passes_[at], at + 1 < passes_.size() ? passes_[at + 1] : plan_.grid.k()};
}

void CpuPreparedPlan::index_transfers() {
  for (const Transfer& transfer : plan_.transfers) channels_.push_back(transfer.channel);
  std::ranges::sort(channels_);
  channels_.erase(std::unique(channels_.begin(), channels_.end()), channels_.end());
  if (std::ssize(channels_) > kMaxChannels) {
    core::fail(ErrorKind::kUnsupported, "{} has transfers on {} channels; the CPU executor has at most {}",
               label_, channels_.size(), kMaxChannels);
  }
  for (const Transfer& transfer : plan_.transfers) {
    const auto channel = std::ranges::lower_bound(channels_, transfer.channel);
    stream_of_.push_back(static_cast<std::size_t>(channel - channels_.begin()));
    has_puts_ |= transfer.kind == TransferKind::kPut;
    receives_input_ |= transfer.destination.count > 0 && transfer.destination.buffer == BufferKind::kInput;
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
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  return {.packed = plan_.packed_size * element,
          .received = plan_.received_size * element,
          .staged = 0,
          .partial = keeps_partial_sums_ ? partial_offset_.back() * kFloat : 0};
}

}  // namespace flashoverlap::cpu
