#include "comm/call.h"

#include <fmt/format.h>

#include <numeric>

#include "core/fail.h"

namespace flashoverlap::comm {
namespace {

constexpr std::size_t kMaxListed = 16;

std::string what_of(const Call& call) {
  const std::string_view type = name_of(call.dtype);
  switch (call.kind) {
    case CallKind::kAllReduce:
      return fmt::format("all-reduce of {} {}", call.send_counts[0], type);
    case CallKind::kReduceScatter:
      return fmt::format("reduce-scatter of {} {}", list_of(call.send_counts), type);
    case CallKind::kAllGather:
      return fmt::format("all-gather of {} {}", list_of(call.receive_counts), type);
    case CallKind::kAllToAll:
      return fmt::format("all-to-all that sends {} and receives {} {}", list_of(call.send_counts),
                         list_of(call.receive_counts), type);
    case CallKind::kSend:
      return fmt::format("send of {} {} to rank {}", call.send_counts[0], type, call.peer);
    case CallKind::kReceive:
      return fmt::format("receive of {} {} from rank {}", call.receive_counts[0], type, call.peer);
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kExchangeInteger:
      return "exchange of an integer";
    case CallKind::kExchangeBytes:
      return "exchange of bytes";
    case CallKind::kSubgroup:
      return fmt::format("subgroup of {}", list_of(call.send_counts));
    case CallKind::kPut:
      return fmt::format("put of {} bytes to rank {}", call.send_counts[0], call.peer);
    case CallKind::kArrivals:
      return "wait for puts";
  }
  return "?";
}

}  // namespace

void Call::set_label(const TransferLabel& label) {
  operation = label.operation;
  wave_group = label.group;
  transfer = label.transfer;
  slice = label.slice;
}

std::string describe(const Call& call) {
  std::string text = what_of(call) + call.group;
  std::string label = call.operation;
  const auto add = [&](std::string_view name, std::int64_t index) {
    if (index < 0) return;
    if (!label.empty()) label += ", ";
    label += fmt::format("{} {}", name, index);
  };
  add("group", call.wave_group);
  add("slice", call.slice);
  add("transfer", call.transfer);
  if (!label.empty()) text += " (" + label + ")";
  return text;
}

std::string list_of(const std::vector<std::int64_t>& values) {
  if (values.size() <= kMaxListed) return fmt::format("{{{}}}", fmt::join(values, ", "));
  return fmt::format("{{{}, … {} in all}}", fmt::join(values.begin(), values.begin() + kMaxListed, ", "),
                     values.size());
}

bool same_collective(const Call& a, const Call& b) {
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case CallKind::kAllReduce:
    case CallKind::kReduceScatter:
      return a.dtype == b.dtype && a.send_counts == b.send_counts;
    case CallKind::kAllGather:
      return a.dtype == b.dtype && a.receive_counts == b.receive_counts;
    case CallKind::kAllToAll:
      return a.dtype == b.dtype;
    case CallKind::kSubgroup:
      return a.send_counts == b.send_counts;
    default:
      return true;
  }
}

Verdict counts_that_disagree(const std::vector<std::shared_ptr<const Call>>& calls,
                             const std::vector<int>& world_ranks) {
  if (calls[0]->kind == CallKind::kSend) {
    const Call& send = *calls[0];
    const Call& receive = *calls[1];
    if (send.dtype == receive.dtype && send.send_counts == receive.receive_counts) return {};
    return core::no("rank {} calls {}, but rank {} calls {}", world_ranks[0], describe(send), world_ranks[1],
                    describe(receive));
  }
  if (calls[0]->kind != CallKind::kAllToAll) return {};
  for (std::size_t source = 0; source < calls.size(); ++source) {
    for (std::size_t destination = 0; destination < calls.size(); ++destination) {
      const std::int64_t sent = calls[source]->send_counts[destination];
      const std::int64_t expected = calls[destination]->receive_counts[source];
      if (sent == expected) continue;
      return core::no(
          "all-to-all{}: rank {} sends {} elements to rank {}, which expects {}; rank {} calls {}, rank {} "
          "calls {}",
          calls[0]->group, world_ranks[source], sent, world_ranks[destination], expected, world_ranks[source],
          describe(*calls[source]), world_ranks[destination], describe(*calls[destination]));
    }
  }
  return {};
}

}  // namespace flashoverlap::comm
