#include "comm/host_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/call_check.h"
#include "core/environment.h"
#include "core/fail.h"
#include "flashoverlap/host_stream.h"

namespace flashoverlap::comm {
namespace {

using std::chrono::milliseconds;

// Ten years: far from overflow when it is added to a time point.
constexpr milliseconds kMaxTimeout{std::chrono::hours{24 * 365 * 10}};

std::vector<std::int64_t> counts_of(std::span<const std::int64_t> counts) {
  return {counts.begin(), counts.end()};
}

}  // namespace

milliseconds checked_timeout(milliseconds timeout) {
  if (timeout.count() < 1) {
    core::fail(ErrorKind::kBadArgument, "time-out {} ms is too small; at least 1 ms is expected",
               timeout.count());
  }
  return std::min(timeout, kMaxTimeout);
}

milliseconds timeout_or_environment(milliseconds timeout, milliseconds standard) {
  if (timeout == standard) {
    const auto from_environment =
        core::integer_from_environment("FLASHOVERLAP_TIMEOUT_MS", 1, kMaxTimeout.count());
    if (from_environment) return milliseconds{*from_environment};
  }
  return checked_timeout(timeout);
}

HostCommunicator::HostCommunicator(std::vector<int> members, int rank, bool is_whole, milliseconds timeout)
    : members_(std::move(members)), rank_(rank), timeout_ms_(timeout.count()) {
  if (!is_whole) group_text_ = " in subgroup " + list_of({members_.begin(), members_.end()});
}

std::unique_ptr<Stream> HostCommunicator::make_stream(const std::string& name) {
  return std::make_unique<HostStream>(name, [abort = aborter(), name] {
    abort(fmt::format("an exception destroyed its stream '{}'", name));
  });
}

void HostCommunicator::all_reduce(const void* send, void* receive, std::int64_t count, DType dtype,
                                  Stream& stream, const TransferLabel& label) {
  put({.kind = CallKind::kAllReduce,
       .dtype = dtype,
       .send = send,
       .receive = receive,
       .send_counts = {count}},
      stream, label);
}

void HostCommunicator::reduce_scatter(const void* send, void* receive, std::span<const std::int64_t> counts,
                                      DType dtype, Stream& stream, const TransferLabel& label) {
  put({.kind = CallKind::kReduceScatter,
       .dtype = dtype,
       .send = send,
       .receive = receive,
       .send_counts = counts_of(counts)},
      stream, label);
}

void HostCommunicator::all_gather(const void* send, void* receive, std::span<const std::int64_t> counts,
                                  DType dtype, Stream& stream, const TransferLabel& label) {
  put({.kind = CallKind::kAllGather,
       .dtype = dtype,
       .send = send,
       .receive = receive,
       .receive_counts = counts_of(counts)},
      stream, label);
}

void HostCommunicator::all_to_all(const void* send, std::span<const std::int64_t> send_counts, void* receive,
                                  std::span<const std::int64_t> receive_counts, DType dtype, Stream& stream,
                                  const TransferLabel& label) {
  put({.kind = CallKind::kAllToAll,
       .dtype = dtype,
       .send = send,
       .receive = receive,
       .send_counts = counts_of(send_counts),
       .receive_counts = counts_of(receive_counts)},
      stream, label);
}

void HostCommunicator::send(const void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
                            const TransferLabel& label) {
  check_peer("send", peer);
  put({.kind = CallKind::kSend,
       .dtype = dtype,
       .send = data,
       .send_counts = {count},
       .peer = members_[static_cast<std::size_t>(peer)]},
      stream, label, {rank_, peer});
}

void HostCommunicator::receive(void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
                               const TransferLabel& label) {
  check_peer("receive", peer);
  put({.kind = CallKind::kReceive,
       .dtype = dtype,
       .receive = data,
       .receive_counts = {count},
       .peer = members_[static_cast<std::size_t>(peer)]},
      stream, label, {peer, rank_});
}

void HostCommunicator::barrier(Stream& stream, const TransferLabel& label) {
  put({.kind = CallKind::kBarrier}, stream, label);
}

std::vector<std::uint64_t> HostCommunicator::exchange(std::uint64_t value, const TransferLabel& label) {
  Call call{.kind = CallKind::kExchangeInteger, .payload = std::string(sizeof(value), '\0')};
  std::memcpy(call.payload.data(), &value, sizeof(value));
  call.group = group_text_;
  call.set_label(label);
  const std::vector<std::string> payloads = exchange_now(std::move(call));
  std::vector<std::uint64_t> values(payloads.size());
  for (std::size_t rank = 0; rank < values.size(); ++rank) {
    std::memcpy(&values[rank], payloads[rank].data(), sizeof(std::uint64_t));
  }
  return values;
}

std::vector<std::string> HostCommunicator::exchange(const std::string& bytes, const TransferLabel& label) {
  Call call{.kind = CallKind::kExchangeBytes, .payload = bytes};
  call.group = group_text_;
  call.set_label(label);
  return exchange_now(std::move(call));
}

std::shared_ptr<Communicator> HostCommunicator::subgroup(std::span<const int> ranks) {
  const std::vector<int> sorted = checked_subgroup(ranks);
  Call call{.kind = CallKind::kSubgroup, .send_counts = {ranks.begin(), ranks.end()}};
  call.group = group_text_;
  return subgroup_now(std::move(call), sorted);
}

void HostCommunicator::set_timeout(milliseconds timeout) {
  timeout_ms_ = checked_timeout(timeout).count();
}

// Checks a call, takes its number now, and lets the stream make it.
void HostCommunicator::put(Call call, Stream& stream, const TransferLabel& label,
                           const std::vector<int>& ranks) {
  call.group = group_text_;
  call.set_label(label);
  auto* const host_stream = dynamic_cast<HostStream*>(&stream);
  if (host_stream == nullptr) {
    core::fail(ErrorKind::kBadArgument,
               "{}: the stream is not a HostStream; make streams with this communicator's make_stream",
               describe(call));
  }
  check_call(call, rank_, size());
  host_stream->enqueue([queued = queue(std::move(call), ranks)] { queued->make(); });
}

void HostCommunicator::check_peer(std::string_view what, int peer) const {
  if (peer >= 0 && peer < size()) return;
  core::fail(ErrorKind::kBadArgument, "{}{}: peer {} is out of range; ranks are 0 to {}", what, group_text_,
             peer, size() - 1);
}

std::vector<int> HostCommunicator::checked_subgroup(std::span<const int> ranks) const {
  std::vector<int> sorted(ranks.begin(), ranks.end());
  const std::string text = list_of({ranks.begin(), ranks.end()});
  std::sort(sorted.begin(), sorted.end());
  if (sorted.empty())
    core::fail(ErrorKind::kBadArgument, "subgroup{}: the list of ranks is empty", group_text_);
  if (sorted.front() < 0 || sorted.back() >= size()) {
    core::fail(ErrorKind::kBadArgument, "subgroup of {}{}: ranks are 0 to {}", text, group_text_, size() - 1);
  }
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    core::fail(ErrorKind::kBadArgument, "subgroup of {}{}: a rank is listed twice", text, group_text_);
  }
  if (!std::binary_search(sorted.begin(), sorted.end(), rank_)) {
    core::fail(ErrorKind::kBadArgument, "subgroup of {}{}: rank {}, which calls it, is not listed", text,
               group_text_, rank_);
  }
  return sorted;
}

}  // namespace flashoverlap::comm
