#include "comm/call_check.h"

#include <cstddef>
#include <limits>
#include <numeric>
#include <string_view>

#include "core/fail.h"

namespace flashoverlap::comm {
namespace {

constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max() / 2;

struct Bytes {
  std::uintptr_t begin;
  std::uintptr_t end;
};

void check_counts(const Call& call, const std::vector<std::int64_t>& counts, std::size_t expected) {
  if (counts.size() != expected) {
    core::fail(ErrorKind::kBadArgument, "{}: {} counts were given; one per rank is expected: {}",
               describe(call), counts.size(), expected);
  }
  std::int64_t left = kMaxBytes / size_of(call.dtype);
  for (const std::int64_t count : counts) {
    if (count < 0) core::fail(ErrorKind::kBadArgument, "{}: count {} is negative", describe(call), count);
    if (count > left) {
      core::fail(ErrorKind::kBadArgument, "{}: the counts do not fit into {} bytes", describe(call),
                 kMaxBytes);
    }
    left -= count;
  }
}

std::int64_t total(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

Bytes check_buffer(const Call& call, std::string_view name, const void* buffer, std::int64_t count) {
  if (count == 0) return {0, 0};
  if (buffer == nullptr) {
    core::fail(ErrorKind::kBadArgument, "{}: the {} buffer is null, but {} elements are expected there",
               describe(call), name, count);
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(buffer);
  const auto alignment = static_cast<std::uintptr_t>(size_of(call.dtype));
  if (begin % alignment != 0) {
    core::fail(ErrorKind::kBadArgument,
               "{}: the {} buffer at {} is not aligned to the {} bytes of an element", describe(call), name,
               buffer, alignment);
  }
  return {begin, begin + static_cast<std::uintptr_t>(count) * alignment};
}

// `in_place`: the smaller buffer lies where the call allows it to lie in the larger one.
void check_overlap(const Call& call, const Bytes& send, const Bytes& receive, bool in_place) {
  const bool overlap = send.begin < receive.end && receive.begin < send.end;
  if (!overlap || in_place) return;
  core::fail(ErrorKind::kBadArgument,
             "{}: the send buffer ({} bytes at {}) and the receive buffer ({} bytes at {}) overlap; they "
             "must be apart{}",
             describe(call), send.end - send.begin, call.send, receive.end - receive.begin,
             static_cast<const void*>(call.receive),
             call.kind == CallKind::kAllToAll ? "" : " or in place as communicator.h says");
}

// The start of chunk `rank` of a buffer.
std::uintptr_t chunk_begin(const Call& call, const Bytes& whole, const std::vector<std::int64_t>& counts,
                           int rank) {
  const std::int64_t before = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  return whole.begin + static_cast<std::uintptr_t>(before * size_of(call.dtype));
}

void check_pair(const Call& call, int rank, int size) {
  const Bytes send = check_buffer(call, "send", call.send, total(call.send_counts));
  const auto own = static_cast<std::size_t>(rank);
  if (call.kind == CallKind::kReduceScatter) {
    const Bytes receive = check_buffer(call, "receive", call.receive, call.send_counts[own]);
    check_overlap(call, send, receive, receive.begin == chunk_begin(call, send, call.send_counts, rank));
  } else if (call.kind == CallKind::kAllToAll) {
    check_counts(call, call.receive_counts, static_cast<std::size_t>(size));
    check_overlap(call, send, check_buffer(call, "receive", call.receive, total(call.receive_counts)), false);
  } else {
    const Bytes receive = check_buffer(call, "receive", call.receive, total(call.send_counts));
    check_overlap(call, send, receive, send.begin == receive.begin);
  }
}

void check_all_gather(const Call& call, int rank) {
  const Bytes receive = check_buffer(call, "receive", call.receive, total(call.receive_counts));
  const Bytes send =
      check_buffer(call, "send", call.send, call.receive_counts[static_cast<std::size_t>(rank)]);
  check_overlap(call, send, receive, send.begin == chunk_begin(call, receive, call.receive_counts, rank));
}

}  // namespace

void check_call(const Call& call, int rank, int size) {
  const auto ranks = static_cast<std::size_t>(size);
  switch (call.kind) {
    case CallKind::kAllReduce:
      check_counts(call, call.send_counts, 1);
      return check_pair(call, rank, size);
    case CallKind::kReduceScatter:
    case CallKind::kAllToAll:
      check_counts(call, call.send_counts, ranks);
      return check_pair(call, rank, size);
    case CallKind::kAllGather:
      check_counts(call, call.receive_counts, ranks);
      return check_all_gather(call, rank);
    case CallKind::kSend:
      check_counts(call, call.send_counts, 1);
      check_buffer(call, "send", call.send, call.send_counts[0]);
      return;
    case CallKind::kReceive:
      check_counts(call, call.receive_counts, 1);
      check_buffer(call, "receive", call.receive, call.receive_counts[0]);
      return;
    default:
      return;
  }
}

}  // namespace flashoverlap::comm
