#include "flashoverlap/in_process.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/call.h"
#include "comm/host_communicator.h"
#include "comm/in_process_world.h"
#include "comm/world.h"
#include "core/fail.h"

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

class InProcessCommunicator final : public HostCommunicator {
 public:
  InProcessCommunicator(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank,
                        milliseconds timeout)
      : HostCommunicator(group->members, rank, group->id == 0, timeout),
        world_(std::move(world)),
        group_(std::move(group)) {}

  [[nodiscard]] std::string_view name() const override { return "in-process"; }
  void abort(const std::string& reason) noexcept override { world_->abort(world_rank(), reason); }

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
