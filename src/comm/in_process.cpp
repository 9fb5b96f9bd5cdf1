#include "flashoverlap/in_process.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/call.h"
#include "comm/host_communicator.h"
#include "comm/in_process_world.h"
#include "comm/world.h"
#include "core/fail.h"
#include "flashoverlap/host_stream.h"
#include "flashoverlap/symmetric_heap.h"

namespace flashoverlap {
namespace comm {
namespace {

using std::chrono::milliseconds;

class InProcessCall final : public QueuedCall {
 public:
  InProcessCall(std::shared_ptr<World> world, Issued issued, milliseconds timeout)
      : world_(std::move(world)), issued_(std::move(issued)), timeout_(timeout) {}
  ~InProcessCall() override {
    if (!made_) world_->drop(issued_);
  }

  void make() override {
    made_ = true;
    world_->meet(issued_, timeout_);
  }

 private:
  std::shared_ptr<World> world_;
  Issued issued_;
  milliseconds timeout_;
  bool made_ = false;
};

class InProcessHeap final : public SymmetricHeap {
 public:
  InProcessHeap(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank,
                const Communicator& owner)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank), owner_(owner) {}

  void open(Window window) override {
    if (open_) core::fail(ErrorKind::kBadArgument, "rank {}: its window is open already", rank_);
    if (window.arrivals_from.size() != group_->members.size() || !window.on_arrival) {
      core::fail(
          ErrorKind::kBadArgument,
          "rank {}: a window with arrivals from {} ranks{}; one number for each of {} ranks and a function "
          "to call are expected",
          rank_, window.arrivals_from.size(), window.on_arrival ? "" : " and nothing to call",
          group_->members.size());
    }
    world_->open_window(group_, key(), std::move(window));
    open_ = true;
  }

  void put(int peer, std::int64_t buffer, std::int64_t offset_bytes, const void* from, std::int64_t bytes,
           std::int64_t slice, Stream& stream, const TransferLabel& label) override {
    if (peer < 0 || peer >= owner_.size()) {
      core::fail(ErrorKind::kBadArgument, "put: peer {} is out of range; ranks are 0 to {}", peer,
                 owner_.size() - 1);
    }
    if (bytes < 0 || (bytes > 0 && from == nullptr)) {
      core::fail(ErrorKind::kBadArgument,
                 "put to rank {}: {} bytes from {}; at least 0 bytes of memory are expected", peer, bytes,
                 from);
    }
    const Put put{rank_, peer, number_, buffer, offset_bytes, from, bytes, slice};
    auto call = call_of({.kind = CallKind::kPut,
                         .send_counts = {bytes},
                         .peer = group_->members[static_cast<std::size_t>(peer)]},
                        label);
    enqueue(stream, [world = world_, group = group_, put, call, timeout = owner_.timeout()] {
      world->put(group, put, call, timeout);
    });
  }

  void await_arrivals(Stream& stream, const TransferLabel& label) override {
    enqueue(stream, [world = world_, group = group_, key = key(),
                     call = call_of({.kind = CallKind::kArrivals}, label),
                     timeout = owner_.timeout()] { world->await_arrivals(group, key, call, timeout); });
  }

  void close() noexcept override {
    if (!open_) return;
    world_->close_window(key());
    open_ = false;
    ++number_;
  }

 private:
  [[nodiscard]] WindowKey key() const { return {group_->id, rank_, number_}; }

  [[nodiscard]] std::shared_ptr<const Call> call_of(Call call, const TransferLabel& label) const {
    call.set_label(label);
    return std::make_shared<const Call>(std::move(call));
  }

  void enqueue(Stream& stream, std::function<void()> task) const {
    auto* const host_stream = dynamic_cast<HostStream*>(&stream);
    if (host_stream == nullptr) {
      core::fail(ErrorKind::kBadArgument,
                 "put: the stream is not a HostStream; make streams with this communicator's make_stream");
    }
    if (!open_) core::fail(ErrorKind::kBadArgument, "rank {}: put without a window open", rank_);
    host_stream->enqueue(std::move(task));
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  int rank_;
  const Communicator& owner_;
  std::uint64_t number_ = 0;
  bool open_ = false;
};

class InProcessCommunicator final : public HostCommunicator {
 public:
  InProcessCommunicator(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank,
                        milliseconds timeout)
      : HostCommunicator(group->members, rank, group->id == 0, timeout),
        world_(std::move(world)),
        group_(std::move(group)),
        heap_(world_, group_, rank, *this) {}

  [[nodiscard]] std::string_view name() const override { return "in-process"; }
  void abort(const std::string& reason) noexcept override { world_->abort(world_rank(), reason); }
  [[nodiscard]] SymmetricHeap* symmetric_heap() override { return &heap_; }

 protected:
  std::shared_ptr<QueuedCall> queue(Call call, const std::vector<int>& ranks) override {
    return std::make_shared<InProcessCall>(world_, issue(std::move(call), ranks), timeout());
  }

  std::vector<std::string> exchange_now(Call call) override {
    const auto meeting = world_->meet(issue(std::move(call), {}), timeout());
    std::vector<std::string> values;
    for (const auto& made : meeting->calls) values.push_back(made->payload);
    return values;
  }

  std::shared_ptr<Communicator> subgroup_now(Call call, const std::vector<int>& sorted) override {
    const std::vector<std::int64_t> listed = call.send_counts;
    const auto meeting = world_->meet(issue(std::move(call), sorted), timeout());
    const auto new_rank = static_cast<int>(std::find(listed.begin(), listed.end(), rank()) - listed.begin());
    return std::make_shared<InProcessCommunicator>(world_, meeting->new_group, new_rank, timeout());
  }

  [[nodiscard]] std::function<void(const std::string&)> aborter() const override {
    return [world = world_, rank = world_rank()](const std::string& reason) { world->abort(rank, reason); };
  }

 private:
  Issued issue(Call call, const std::vector<int>& ranks) {
    return world_->issue(group_, rank(), std::make_shared<const Call>(std::move(call)), ranks);
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  InProcessHeap heap_;
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

}  // namespace

InProcessWorld make_in_process_world(int world_size, const InProcessOptions& options) {
  check_options(world_size, options);
  const milliseconds timeout = timeout_or_environment(options.timeout, InProcessOptions{}.timeout);
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
