#include "flashoverlap/in_process.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "comm/call.h"
#include "comm/call_check.h"
#include "comm/in_process_world.h"
#include "comm/world.h"
#include "core/environment.h"
#include "core/fail.h"
#include "flashoverlap/host_stream.h"

namespace flashoverlap {
namespace comm {
namespace {

using std::chrono::milliseconds;

// Ten years: far from overflow when it is added to a time point.
constexpr milliseconds kMaxTimeout{std::chrono::hours{24 * 365 * 10}};

milliseconds checked_timeout(milliseconds timeout) {
  if (timeout.count() < 1) {
    core::fail(ErrorKind::kBadArgument, "time-out {} ms is too small; at least 1 ms is expected",
               timeout.count());
  }
  return std::min(timeout, kMaxTimeout);
}

std::vector<std::int64_t> counts_of(std::span<const std::int64_t> counts) {
  return {counts.begin(), counts.end()};
}

// A call that a stream holds. A stream that drops it tells the others, who would otherwise wait for it in
// vain.
class QueuedCall {
 public:
  QueuedCall(std::shared_ptr<World> world, Issued issued, milliseconds timeout)
      : world_(std::move(world)), issued_(std::move(issued)), timeout_(timeout) {}
  ~QueuedCall() {
    if (!made_) world_->drop(issued_);
  }
  QueuedCall(const QueuedCall&) = delete;
  QueuedCall& operator=(const QueuedCall&) = delete;

  void make() {
    made_ = true;
    world_->meet(issued_, timeout_);
  }

 private:
  std::shared_ptr<World> world_;
  Issued issued_;
  milliseconds timeout_;
  bool made_ = false;
};

class InProcessCommunicator final : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank,
                        milliseconds timeout)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank), timeout_ms_(timeout.count()) {
    if (group_->id == 0) return;
    group_text_ = " in subgroup " + list_of({group_->members.begin(), group_->members.end()});
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return static_cast<int>(group_->members.size()); }
  [[nodiscard]] std::string_view name() const override { return "in-process"; }

  [[nodiscard]] std::unique_ptr<Stream> make_stream(const std::string& name) override {
    return std::make_unique<HostStream>(name, [world = world_, rank = world_rank(), name] {
      world->abort(rank, fmt::format("an exception destroyed its stream '{}'", name));
    });
  }

  void all_reduce(const void* send, void* receive, std::int64_t count, DType dtype, Stream& stream,
                  const TransferLabel& label) override {
    put({.kind = CallKind::kAllReduce,
         .dtype = dtype,
         .send = send,
         .receive = receive,
         .send_counts = {count}},
        stream, label);
  }

  void reduce_scatter(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                      Stream& stream, const TransferLabel& label) override {
    put({.kind = CallKind::kReduceScatter,
         .dtype = dtype,
         .send = send,
         .receive = receive,
         .send_counts = counts_of(counts)},
        stream, label);
  }

  void all_gather(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                  Stream& stream, const TransferLabel& label) override {
    put({.kind = CallKind::kAllGather,
         .dtype = dtype,
         .send = send,
         .receive = receive,
         .receive_counts = counts_of(counts)},
        stream, label);
  }

  void all_to_all(const void* send, std::span<const std::int64_t> send_counts, void* receive,
                  std::span<const std::int64_t> receive_counts, DType dtype, Stream& stream,
                  const TransferLabel& label) override {
    put({.kind = CallKind::kAllToAll,
         .dtype = dtype,
         .send = send,
         .receive = receive,
         .send_counts = counts_of(send_counts),
         .receive_counts = counts_of(receive_counts)},
        stream, label);
  }

  void send(const void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
            const TransferLabel& label) override {
    check_peer("send", peer);
    put({.kind = CallKind::kSend,
         .dtype = dtype,
         .send = data,
         .send_counts = {count},
         .peer = world_rank_of(peer)},
        stream, label, {rank_, peer});
  }

  void receive(void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
               const TransferLabel& label) override {
    check_peer("receive", peer);
    put({.kind = CallKind::kReceive,
         .dtype = dtype,
         .receive = data,
         .receive_counts = {count},
         .peer = world_rank_of(peer)},
        stream, label, {peer, rank_});
  }

  void barrier(Stream& stream, const TransferLabel& label) override {
    put({.kind = CallKind::kBarrier}, stream, label);
  }

  std::vector<std::uint64_t> exchange(std::uint64_t value, const TransferLabel& label) override {
    std::string bytes(sizeof(value), '\0');
    std::memcpy(bytes.data(), &value, sizeof(value));
    const auto meeting = meet_now({.kind = CallKind::kExchangeInteger, .payload = std::move(bytes)}, label);
    std::vector<std::uint64_t> values(meeting->calls.size());
    for (std::size_t rank = 0; rank < values.size(); ++rank) {
      std::memcpy(&values[rank], meeting->calls[rank]->payload.data(), sizeof(std::uint64_t));
    }
    return values;
  }

  std::vector<std::string> exchange(const std::string& bytes, const TransferLabel& label) override {
    const auto meeting = meet_now({.kind = CallKind::kExchangeBytes, .payload = bytes}, label);
    std::vector<std::string> values;
    for (const auto& call : meeting->calls) values.push_back(call->payload);
    return values;
  }

  [[nodiscard]] std::shared_ptr<Communicator> subgroup(std::span<const int> ranks) override {
    const std::vector<int> sorted = checked_subgroup(ranks);
    const auto meeting =
        meet_now({.kind = CallKind::kSubgroup, .send_counts = {ranks.begin(), ranks.end()}}, {}, sorted);
    const auto new_rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
    return std::make_shared<InProcessCommunicator>(world_, meeting->new_group, new_rank, timeout());
  }

  void abort(const std::string& reason) noexcept override { world_->abort(world_rank(), reason); }

  void set_timeout(milliseconds timeout) override { timeout_ms_ = checked_timeout(timeout).count(); }
  [[nodiscard]] milliseconds timeout() const override { return milliseconds{timeout_ms_.load()}; }

  [[nodiscard]] const std::shared_ptr<World>& world() const { return world_; }

 private:
  [[nodiscard]] int world_rank_of(int rank) const { return group_->members[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] int world_rank() const { return world_rank_of(rank_); }

  // Checks a call, takes its number now, and lets the stream make it. `ranks` as in World::issue.
  void put(Call call, Stream& stream, const TransferLabel& label, const std::vector<int>& ranks = {}) {
    call.group = group_text_;
    call.set_label(label);
    auto* const host_stream = dynamic_cast<HostStream*>(&stream);
    if (host_stream == nullptr) {
      core::fail(ErrorKind::kBadArgument,
                 "{}: the stream is not a HostStream; make streams with this communicator's make_stream",
                 describe(call));
    }
    check_call(call, rank_, size());
    auto queued = std::make_shared<QueuedCall>(
        world_, world_->issue(group_, rank_, std::make_shared<const Call>(std::move(call)), ranks),
        timeout());
    host_stream->enqueue([queued = std::move(queued)] { queued->make(); });
  }

  std::shared_ptr<const Meeting> meet_now(Call call, const TransferLabel& label,
                                          const std::vector<int>& ranks = {}) {
    call.group = group_text_;
    call.set_label(label);
    return world_->meet(world_->issue(group_, rank_, std::make_shared<const Call>(std::move(call)), ranks),
                        timeout());
  }

  void check_peer(std::string_view what, int peer) const {
    if (peer >= 0 && peer < size()) return;
    core::fail(ErrorKind::kBadArgument, "{}{}: peer {} is out of range; ranks are 0 to {}", what, group_text_,
               peer, size() - 1);
  }

  [[nodiscard]] std::vector<int> checked_subgroup(std::span<const int> ranks) const {
    std::vector<int> sorted(ranks.begin(), ranks.end());
    const std::string text = list_of({ranks.begin(), ranks.end()});
    std::sort(sorted.begin(), sorted.end());
    if (sorted.empty())
      core::fail(ErrorKind::kBadArgument, "subgroup{}: the list of ranks is empty", group_text_);
    if (sorted.front() < 0 || sorted.back() >= size()) {
      core::fail(ErrorKind::kBadArgument, "subgroup of {}{}: ranks are 0 to {}", text, group_text_,
                 size() - 1);
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

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  int rank_;
  std::atomic<std::int64_t> timeout_ms_;
  std::string group_text_;  // As in Call::group.
};

void check_options(int world_size, const InProcessOptions& options) {
  if (world_size < 1)
    core::fail(ErrorKind::kBadArgument, "world size {}: at least 1 is expected", world_size);
  const auto check = [](std::string_view name, double value) {
    if (std::isfinite(value) && value >= 0) return;
    core::fail(ErrorKind::kBadArgument, "link {} {}: a finite number, 0 or more, is expected", name, value);
  };
  check("bandwidth in GB/s", options.link.bandwidth_gbps);
  check("latency in us", options.link.latency_us);
}

milliseconds timeout_of(const InProcessOptions& options) {
  if (options.timeout == InProcessOptions{}.timeout) {
    const auto from_environment =
        core::integer_from_environment("FLASHOVERLAP_TIMEOUT_MS", 1, milliseconds{kMaxTimeout}.count());
    if (from_environment) return milliseconds{*from_environment};
  }
  return checked_timeout(options.timeout);
}

}  // namespace

InProcessWorld make_in_process_world(int world_size, const InProcessOptions& options) {
  check_options(world_size, options);
  const milliseconds timeout = timeout_of(options);
  InProcessWorld made{std::make_shared<World>(world_size, options.link), {}};
  for (int rank = 0; rank < world_size; ++rank) {
    made.communicators.push_back(
        std::make_shared<InProcessCommunicator>(made.world, made.world->whole(), rank, timeout));
  }
  return made;
}

}  // namespace comm

std::vector<std::shared_ptr<Communicator>> make_in_process_communicators(int world_size,
                                                                         const InProcessOptions& options) {
  return comm::make_in_process_world(world_size, options).communicators;
}

}  // namespace flashoverlap
