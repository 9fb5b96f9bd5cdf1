#include "sim/transfer_bytes.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace flashoverlap::sim {
namespace {

std::int64_t to_others(const std::vector<std::int64_t>& counts, std::int64_t total, const OverlapPlan& plan) {
  if (counts.empty()) return total / plan.world_size * (plan.world_size - 1);
  std::int64_t others = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    if (static_cast<std::int64_t>(rank) != plan.rank) others += counts[rank];
  }
  return others;
}

}  // namespace

std::int64_t curve_bytes(const OverlapPlan& plan, const Transfer& transfer) {
  const std::int64_t element = size_of(plan.dtype);
  switch (transfer.kind) {
    case TransferKind::kAllReduce:
    case TransferKind::kReduceScatter:
    case TransferKind::kSend:
    case TransferKind::kPut:
      return transfer.source.count * element;
    case TransferKind::kAllGather:
    case TransferKind::kReceive:
      return transfer.destination.count * element;
    case TransferKind::kAllToAll: {
      if (plan.world_size < 2) return 0;
      const Payload payload = payload_bytes(plan, transfer);
      const std::int64_t others = std::max(payload.sent, payload.received);
      return (others * plan.world_size + plan.world_size - 2) / (plan.world_size - 1);
    }
  }
  return 0;
}

Payload payload_bytes(const OverlapPlan& plan, const Transfer& transfer) {
  const std::int64_t element = size_of(plan.dtype);
  const std::int64_t source = transfer.source.count;
  const std::int64_t destination = transfer.destination.count;
  switch (transfer.kind) {
    case TransferKind::kAllReduce:
      return {source * element, destination * element};
    case TransferKind::kReduceScatter:
      return {to_others(transfer.send_counts, source, plan) * element, destination * element};
    case TransferKind::kAllGather:
      return {source * element, to_others(transfer.receive_counts, destination, plan) * element};
    case TransferKind::kAllToAll:
      return {to_others(transfer.send_counts, source, plan) * element,
              to_others(transfer.receive_counts, destination, plan) * element};
    case TransferKind::kSend:
    case TransferKind::kPut:
      return {source * element, 0};
    case TransferKind::kReceive:
      return {0, destination * element};
  }
  return {};
}

}  // namespace flashoverlap::sim
