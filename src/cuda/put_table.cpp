#include "put_table.h"

#include <algorithm>

#include "core/fail.h"

namespace flashoverlap::cuda {
namespace {

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

void check_put(const OverlapPlan& plan, std::size_t index) {
  const Transfer& transfer = plan.transfers[index];
  const bool is_put = transfer.kind == TransferKind::kPut;
  const bool is_of_results =
      transfer.source.buffer == BufferKind::kPacked && transfer.destination.buffer == BufferKind::kReceived;
  const bool is_nothing = transfer.source.count == 0;
  const bool follows_group = transfer.trigger.kind == TriggerKind::kGroup;
  if (is_put && is_of_results && (is_nothing || follows_group) && plan.gates.empty()) return;
  core::fail(
      ErrorKind::kUnsupported,
      "the GPU executor puts what a group of tiles has left in the packed buffer into the received "
      "one, in plans without gates; transfer {} of the plan of {} is a {} from the {} to the {} buffer",
      index, plan.operation, name_of(transfer.kind), name_of(transfer.source.buffer),
      name_of(transfer.destination.buffer));
}

std::uint32_t paced_ns_of(const PutWork& put, std::int32_t rank, const LinkModel& link) {
  if (put.peer == rank || put.bytes == 0) return 0;
  const double wire_ns = link.bandwidth_gbps > 0 ? static_cast<double>(put.bytes) / link.bandwidth_gbps : 0;
  constexpr double kMost = 4e9;
  return static_cast<std::uint32_t>(std::min(kMost, wire_ns + link.latency_us * 1e3));
}

}  // namespace

bool has_puts(const OverlapPlan& plan) {
  return std::ranges::any_of(plan.transfers, [](const Transfer& t) { return t.kind == TransferKind::kPut; });
}

PutTable make_put_table(const OverlapPlan& plan, bool last_ends_gemm, const LinkModel& link) {
  PutTable table;
  table.sent.assign(as_index(plan.world_size), 0);
  table.received.assign(as_index(plan.world_size), 0);
  const std::int64_t size = size_of(plan.dtype);
  const auto add = [&](PutWork put) {
    put.ordinal = ++table.sent[as_index(put.peer)];
    put.paced_ns = paced_ns_of(put, plan.rank, link);
    table.puts.push_back(put);
  };
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    check_put(plan, i);
    const Transfer& transfer = plan.transfers[i];
    if (transfer.source.count == 0) continue;
    add({.from = transfer.source.offset * size,
         .to = transfer.destination.offset * size,
         .bytes = transfer.source.count * size,
         .peer = transfer.peer,
         .group = static_cast<std::int32_t>(transfer.trigger.index),
         .tiles = static_cast<std::uint32_t>(plan.groups[as_index(transfer.trigger.index)].num_tiles)});
  }
  for (const Slice& slice : plan.slices) {
    if (slice.region.count > 0) ++table.received[as_index(slice.source)];
  }
  // All groups before the last one have puts, so this one is what is left to wait for.
  PutWork last;
  if (last_ends_gemm && !plan.groups.empty()) {
    last.group = static_cast<std::int32_t>(plan.groups.size()) - 1;
    last.tiles = static_cast<std::uint32_t>(plan.groups.back().num_tiles);
  }
  for (std::int32_t peer = 0; peer < plan.world_size; ++peer) {
    if (peer == plan.rank) continue;
    last.peer = peer;
    if (last_ends_gemm || table.sent[as_index(peer)] == 0) add(last);
    if (last_ends_gemm || table.received[as_index(peer)] == 0) ++table.received[as_index(peer)];
  }
  return table;
}

}  // namespace flashoverlap::cuda
