#include "comm/link.h"

#include <algorithm>
#include <numeric>

namespace flashoverlap::comm {
namespace {

using Calls = std::vector<std::shared_ptr<const Call>>;
using std::chrono::steady_clock;

// Three years: far beyond any use, and far from overflow even when many calls queue.
constexpr double kMaxSeconds = 1e8;

steady_clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<steady_clock::duration>(
      std::chrono::duration<double>(std::min(seconds, kMaxSeconds)));
}

double total(const std::vector<std::int64_t>& counts) {
  return static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
}

// What a rank of an all-to-all exchanges with the others; its own chunk does not travel.
WireBytes all_to_all_bytes(const Call& call, std::size_t rank, double element_bytes) {
  return {(total(call.send_counts) - static_cast<double>(call.send_counts[rank])) * element_bytes,
          (total(call.receive_counts) - static_cast<double>(call.receive_counts[rank])) * element_bytes};
}

TimePoint occupy_direction(TimePoint& free, const LinkModel& model, TimePoint ready, double bytes) {
  if (bytes <= 0 || model.bandwidth_gbps <= 0) return ready;
  free = std::max(free, ready) + to_duration(bytes / (model.bandwidth_gbps * 1e9));
  return free;
}

TimePoint later_end(const Link::Ends& ends) {
  return std::max(ends.transmit, ends.receive);
}

// An all-to-all's rank waits for those that send to it and those that it sends to, and for nobody else.
TimePoint all_to_all_end(const Calls& calls, const std::vector<Link::Ends>& ends, std::size_t rank) {
  TimePoint end = later_end(ends[rank]);
  for (std::size_t peer = 0; peer < calls.size(); ++peer) {
    if (peer == rank) continue;
    if (calls[rank]->receive_counts[peer] > 0) end = std::max(end, ends[peer].transmit);
    if (calls[rank]->send_counts[peer] > 0) end = std::max(end, ends[peer].receive);
  }
  return end;
}

}  // namespace

std::vector<WireBytes> bytes_on_wire(const Calls& calls) {
  const Call& first = *calls[0];
  const auto element_bytes = static_cast<double>(size_of(first.dtype));
  const auto world_size = static_cast<double>(calls.size());
  const double share = (world_size - 1) / world_size;
  const auto same = [&](double bytes) {
    return std::vector<WireBytes>(calls.size(), WireBytes{bytes, bytes});
  };
  switch (first.kind) {
    case CallKind::kAllReduce:
      return same(2 * share * total(first.send_counts) * element_bytes);
    case CallKind::kReduceScatter:
      return same(share * total(first.send_counts) * element_bytes);
    case CallKind::kAllGather:
      return same(share * total(first.receive_counts) * element_bytes);
    case CallKind::kSend:
      return {{total(first.send_counts) * element_bytes, 0}, {0, total(first.send_counts) * element_bytes}};
    case CallKind::kAllToAll: {
      std::vector<WireBytes> bytes;
      for (std::size_t rank = 0; rank < calls.size(); ++rank) {
        bytes.push_back(all_to_all_bytes(*calls[rank], rank, element_bytes));
      }
      return bytes;
    }
    default:
      return same(0);
  }
}

Link::Ends Link::occupy(const LinkModel& model, TimePoint ready, const WireBytes& bytes) {
  return {occupy_direction(transmit_free_, model, ready, bytes.transmit),
          occupy_direction(receive_free_, model, ready, bytes.receive)};
}

std::vector<TimePoint> book(const LinkModel& model, const std::vector<Link*>& links, TimePoint ready,
                            const Calls& calls) {
  const std::vector<WireBytes> bytes = bytes_on_wire(calls);
  std::vector<Link::Ends> ends;
  TimePoint last = ready;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    ends.push_back(links[i]->occupy(model, ready, bytes[i]));
    last = std::max(last, later_end(ends.back()));
  }
  const steady_clock::duration latency = to_duration(model.latency_us * 1e-6);
  std::vector<TimePoint> completions(calls.size(), last + latency);
  if (calls[0]->kind != CallKind::kAllToAll) return completions;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    completions[rank] = all_to_all_end(calls, ends, rank) + latency;
  }
  return completions;
}

TimePoint book_put(const LinkModel& model, Link& source, Link& destination, TimePoint ready, double bytes) {
  const Link::Ends sent = source.occupy(model, ready, {.transmit = bytes, .receive = 0});
  const Link::Ends received = destination.occupy(model, ready, {.transmit = 0, .receive = bytes});
  return std::max(sent.transmit, received.receive) + to_duration(model.latency_us * 1e-6);
}

}  // namespace flashoverlap::comm
