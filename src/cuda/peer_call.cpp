#include "peer_call.h"

#include <fmt/ranges.h>

namespace flashoverlap::cuda {
namespace {

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

// The counts of the messages to or from `peer`, in order.
std::vector<std::int64_t> counts_with(const std::vector<PeerMessage>& messages, int peer) {
  std::vector<std::int64_t> counts;
  for (const PeerMessage& message : messages) {
    if (message.peer == peer) counts.push_back(message.count);
  }
  return counts;
}

std::string mismatch_of_pair(const std::vector<PeerCall>& calls, int from, int to) {
  const PeerCall& sender = calls[index(from)];
  const PeerCall& receiver = calls[index(to)];
  const std::vector<std::int64_t> sent = counts_with(sender.sends, to);
  const std::vector<std::int64_t> expected = counts_with(receiver.receives, from);
  if (sent != expected) {
    return fmt::format("{}: rank {} sends messages of [{}] elements to rank {}, which expects [{}]",
                       describe(calls.front()), from, fmt::join(sent, ", "), to, fmt::join(expected, ", "));
  }
  if (sender.kind != "all-to-all" || sender.send_counts[index(to)] == receiver.receive_counts[index(from)])
    return {};
  return fmt::format("{}: rank {} sends {} elements to rank {}, which expects {}", describe(calls.front()),
                     from, sender.send_counts[index(to)], to, receiver.receive_counts[index(from)]);
}

}  // namespace

std::string describe(const PeerCall& call) {
  std::string text(call.kind);
  if (!call.label.operation.empty()) text += fmt::format(" for {}", call.label.operation);
  if (call.label.group >= 0) text += fmt::format(", group {}", call.label.group);
  if (call.label.slice >= 0) text += fmt::format(", slice {}", call.label.slice);
  return text;
}

std::string mismatch(const std::vector<PeerCall>& calls) {
  const PeerCall& first = calls.front();
  const int size = static_cast<int>(calls.size());
  for (int r = 0; r < size; ++r) {
    const PeerCall& call = calls[index(r)];
    const bool same_counts = first.kind == "all-to-all" || call.send_counts == first.send_counts;
    if (call.kind == first.kind && call.dtype == first.dtype && same_counts) continue;
    return fmt::format("the ranks' calls do not match: rank 0 calls {} ({}), rank {} calls {} ({}){}",
                       describe(first), name_of(first.dtype), r, describe(call), name_of(call.dtype),
                       same_counts ? "" : " with other counts");
  }
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      if (std::string why = mismatch_of_pair(calls, from, to); !why.empty()) return why;
    }
  }
  return {};
}

}  // namespace flashoverlap::cuda
