#include "cpu/put_window.h"

#include <vector>

#include "flashoverlap/communicator.h"

namespace flashoverlap::cpu {
namespace {

/// Puts that come from each rank: slices that no transfer of this rank brings.
std::vector<std::int64_t> arrivals_from(const OverlapPlan& plan) {
  std::vector<bool> brought(plan.slices.size(), false);
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.slice >= 0 && transfer.kind != TransferKind::kPut) {
      brought[static_cast<std::size_t>(transfer.slice)] = true;
    }
  }
  std::vector<std::int64_t> arrivals(static_cast<std::size_t>(plan.world_size), 0);
  for (std::size_t slice = 0; slice < plan.slices.size(); ++slice) {
    if (!brought[slice]) ++arrivals[static_cast<std::size_t>(plan.slices[slice].source)];
  }
  return arrivals;
}

SymmetricHeap::Window window_of(const Run::Parts& parts, const BufferTable& buffers,
                                const std::shared_ptr<Progress>& progress) {
  const OverlapPlan& plan = parts.prepared.plan();
  const std::int64_t element = size_of(plan.dtype);
  SymmetricHeap::Window window;
  window.buffers.resize(buffers.size());
  const auto open = [&](BufferKind kind, std::int64_t elements) {
    const auto at = static_cast<std::size_t>(kind);
    window.buffers[at] = {buffers[at], elements * element};
  };
  open(BufferKind::kInput, plan.grid.rows() * plan.grid.k());
  open(BufferKind::kReceived, plan.received_size);
  open(BufferKind::kOutput, plan.output_rows * plan.output_cols);
  window.arrivals_from = arrivals_from(plan);
  window.on_arrival = [progress](std::int64_t slice) { progress->mark_slice(slice); };
  return window;
}

}  // namespace

PutWindow::PutWindow(const Run::Parts& parts, const BufferTable& buffers,
                     const std::shared_ptr<Progress>& progress)
    : heap_(*parts.communicator.symmetric_heap()) {
  heap_.open(window_of(parts, buffers, progress));
}

}  // namespace flashoverlap::cpu
