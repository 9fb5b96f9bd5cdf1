#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <utility>

#include "comm/host_communicator.h"
#include "comm/mpi/call_run.h"
#include "comm/mpi/mpi_error.h"
#include "comm/mpi/runtime.h"
#include "comm/mpi/service.h"
#include "core/fail.h"
#include "core/watchdog.h"
#include "flashoverlap/mpi.h"

namespace flashoverlap {
namespace comm::mpi {
namespace {

using std::chrono::milliseconds;

class MpiCall final : public QueuedCall {
 public:
  MpiCall(std::shared_ptr<MpiGroup> group, Issued issued, milliseconds timeout)
      : group_(std::move(group)), issued_(std::move(issued)), timeout_(timeout) {}
  ~MpiCall() override {
    if (made_ || group_->world().failed()) return;
    group_->world().abort("its stream dropped " + describe(*issued_.call) +
                          ", because it met an error or was destroyed");
  }

  void make() override {
    made_ = true;
    CallRun::make(*group_, issued_, timeout_);
  }

 private:
  std::shared_ptr<MpiGroup> group_;
  Issued issued_;
  milliseconds timeout_;
  bool made_ = false;
};

/// Tells the other ranks when the last communicator of a world here is gone.
struct Presence {
  std::shared_ptr<MpiWorld> world;
  ~Presence() { world->finish(); }
};

std::vector<int> all_but(int rank, int size) {
  std::vector<int> ranks;
  for (int other = 0; other < size; ++other) {
    if (other != rank) ranks.push_back(other);
  }
  return ranks;
}

class MpiCommunicator final : public HostCommunicator {
 public:
  MpiCommunicator(std::shared_ptr<Presence> presence, std::shared_ptr<MpiGroup> group, bool is_whole,
                  milliseconds timeout)
      : HostCommunicator(group->members(), group->rank(), is_whole, timeout),
        presence_(std::move(presence)),
        group_(std::move(group)) {}

  [[nodiscard]] std::string_view name() const override { return "mpi"; }
  void abort(const std::string& reason) noexcept override { group_->world().abort(reason); }

 protected:
  std::shared_ptr<QueuedCall> queue(Call call, const std::vector<int>& ranks) override {
    return std::make_shared<MpiCall>(group_, issue(std::move(call), ranks), timeout());
  }

  std::vector<std::string> exchange_now(Call call) override {
    return CallRun::make(*group_, issue(std::move(call), {}), timeout());
  }

  std::shared_ptr<Communicator> subgroup_now(Call call, const std::vector<int>& sorted) override {
    const std::vector<int> listed(call.send_counts.begin(), call.send_counts.end());
    const Issued issued = issue(std::move(call), sorted);
    CallRun::make(*group_, issued, timeout());  // All are here, with the same list.
    auto made = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
    call_with_timeout(
        timeout(), describe(*issued.call),
        [made, listed, group = group_, tag = group_->tag(issued.number, MessageKind::kSubgroup)] {
          create(*made, listed, *group, tag);
        });
    std::vector<int> members;
    for (const int listed_rank : listed) members.push_back(group_->world_rank(listed_rank));
    const auto new_rank = static_cast<int>(std::find(listed.begin(), listed.end(), rank()) - listed.begin());
    auto group = std::make_shared<MpiGroup>(group_->shared_world(), *made, std::move(members), new_rank);
    return std::make_shared<MpiCommunicator>(presence_, std::move(group), false, timeout());
  }

  [[nodiscard]] std::function<void(const std::string&)> aborter() const override {
    // With no call in flight there is nothing to interrupt: the other ranks learn that this one has finished,
    // unless its communicator lives on. An abort could overtake messages of the last call that all ranks
    // completed.
    return [world = group_->shared_world()](const std::string& reason) {
      if (world->has_calls_in_flight()) world->abort(reason);
    };
  }

 private:
  static void create(MPI_Comm& made, const std::vector<int>& listed, const MpiGroup& parent, int tag) {
    MPI_Group all = MPI_GROUP_NULL;
    MPI_Group chosen = MPI_GROUP_NULL;
    check(MPI_Comm_group(parent.communicator(), &all), "MPI_Comm_group");
    check(MPI_Group_incl(all, static_cast<int>(listed.size()), listed.data(), &chosen), "MPI_Group_incl");
    check(MPI_Comm_create_group(parent.communicator(), chosen, tag, &made), "MPI_Comm_create_group");
    MPI_Group_free(&chosen);
    MPI_Group_free(&all);
  }

  Issued issue(Call call, const std::vector<int>& ranks) {
    Issued issued;
    const CallKind kind = call.kind;
    issued.call = std::make_shared<const Call>(std::move(call));
    group_->world().note_issued(issued.call);
    if (kind == CallKind::kSend) {
      issued.number = group_->next_send(ranks[1]);
      issued.peers = {ranks[1]};
    } else if (kind == CallKind::kReceive) {
      issued.number = group_->next_receive(ranks[0]);
      issued.peers = {ranks[0]};
    } else if (kind == CallKind::kSubgroup) {
      issued.number = group_->next_subgroup(ranks);
      issued.peers = ranks;
      std::erase(issued.peers, rank());
    } else {
      issued.number = group_->next_collective();
      issued.peers = all_but(rank(), size());
    }
    return issued;
  }

  std::shared_ptr<Presence> presence_;
  std::shared_ptr<MpiGroup> group_;
};

struct Duplicates {
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Comm data = MPI_COMM_NULL;
};

// Duplicates of `original`, with a connection between each pair of ranks: MPI makes connections when they are
// first used, which would be too late when one is needed to say what went wrong.
Duplicates duplicate(MPI_Comm original) {
  Duplicates made;
  check(MPI_Comm_dup(original, &made.control), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(made.control, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_dup(original, &made.data), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(made.data, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int rank = 0;
  int size = 1;
  check(MPI_Comm_rank(made.data, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(made.data, &size), "MPI_Comm_size");
  char nothing = 0;
  std::vector<MPI_Request> requests;
  std::vector<char> received(static_cast<std::size_t>(size));
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    MPI_Request* receive = &requests.emplace_back();
    check(MPI_Irecv(&received[static_cast<std::size_t>(other)], 1, MPI_BYTE, other, 0, made.data, receive),
          "MPI_Irecv");
    MPI_Request* send = &requests.emplace_back();
    check(MPI_Isend(&nothing, 1, MPI_BYTE, other, 0, made.data, send), "MPI_Isend");
  }
  check(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE), "MPI_Waitall");
  return made;
}

// The source of a report lives as long as somebody makes calls.
struct ReportedPresence : Presence {
  explicit ReportedPresence(std::shared_ptr<MpiWorld> reported)
      : Presence{std::move(reported)}, source("communicators", [world_ptr = std::weak_ptr<MpiWorld>(world)] {
          const auto locked = world_ptr.lock();
          return locked ? locked->report() : std::string("null");
        }) {}
  core::WatchdogSource source;
};

}  // namespace
}  // namespace comm::mpi

std::shared_ptr<Communicator> make_mpi_communicator(const MpiOptions& options) {
  using namespace comm::mpi;
  const auto timeout = comm::timeout_or_environment(options.timeout, MpiOptions{}.timeout);
  require_mpi(timeout);
  const MPI_Comm original =
      options.communicator == nullptr ? MPI_COMM_WORLD : *static_cast<const MPI_Comm*>(options.communicator);
  auto made = std::make_shared<Duplicates>();
  call_with_timeout(timeout, "making the MPI communicator",
                    [made, original] { *made = duplicate(original); });
  auto world = std::make_shared<MpiWorld>(made->control);
  Service::instance().add(world);
  std::vector<int> members(static_cast<std::size_t>(world->size()));
  std::iota(members.begin(), members.end(), 0);
  auto group = std::make_shared<MpiGroup>(world, made->data, std::move(members), world->rank());
  return std::make_shared<MpiCommunicator>(std::make_shared<ReportedPresence>(world), std::move(group), true,
                                           timeout);
}

std::string mpi_library_name() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  comm::mpi::check(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
  const std::string whole(text.data(), static_cast<std::size_t>(length));
  std::string name = whole.substr(0, whole.find_first_of(",\n"));
  constexpr std::string_view kMpich = "MPICH Version:\t";
  if (name.starts_with(kMpich)) return "MPICH " + name.substr(kMpich.size());
  return name;
}

}  // namespace flashoverlap
