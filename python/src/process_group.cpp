#include <fmt/format.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "comm/host_communicator.h"
#include "comm/rank_sum.h"
#include "core/fail.h"
#include "plan/agreement.h"

/// Ranks that are processes of somebody else's process group (torch.distributed): that one moves bytes, sums
/// are ours, so that results have the bits of the other providers.
namespace flashoverlap::python {
namespace {

using comm::Call;
using comm::CallKind;

/// Bytes for or from another rank.
struct Message {
  int peer = 0;
  const void* data = nullptr;
  std::int64_t bytes = 0;
};

/// The Python object that moves bytes: move(sends, receives, tag, timeout), each a list of (rank, address,
/// bytes); subgroup(ranks).
class Mover {
 public:
  explicit Mover(nb::object backend)
      : backend_(new nb::object(std::move(backend)), [](nb::object* gone) {
          const nb::gil_scoped_acquire acquire;
          delete gone;
        }) {}

  /// Blocks until all has arrived and all buffers are free again. Throws Error(kCommunication or kTimeout).
  void move(const std::vector<Message>& sends, const std::vector<Message>& receives, std::int64_t tag,
            std::chrono::milliseconds timeout, const std::string& what) {
    const nb::gil_scoped_acquire acquire;
    try {
      backend_->attr("move")(list_of(sends), list_of(receives), tag,
                             static_cast<double>(timeout.count()) / 1e3);
    } catch (nb::python_error& error) {
      const bool late = error.matches(PyExc_TimeoutError);
      const std::string text = fmt::format("{}: {}", what, nb::str(error.value()).c_str());
      throw Error(late ? ErrorKind::kTimeout : ErrorKind::kCommunication, text);
    }
  }

  [[nodiscard]] std::shared_ptr<Mover> subgroup(const std::vector<std::int64_t>& ranks) const {
    const nb::gil_scoped_acquire acquire;
    try {
      return std::make_shared<Mover>(nb::object(backend_->attr("subgroup")(ranks)));
    } catch (nb::python_error& error) {
      throw Error(ErrorKind::kCommunication, fmt::format("subgroup: {}", nb::str(error.value()).c_str()));
    }
  }

 private:
  static nb::list list_of(const std::vector<Message>& messages) {
    nb::list list;
    for (const Message& message : messages) {
      list.append(
          nb::make_tuple(message.peer, reinterpret_cast<std::uintptr_t>(message.data), message.bytes));
    }
    return list;
  }

  std::shared_ptr<nb::object> backend_;
};

/// What a communicator and its queued calls share. Thread-safe.
class Link {
 public:
  Link(std::shared_ptr<Mover> mover, int rank, int size)
      : mover_(std::move(mover)), rank_(rank), size_(size) {}

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] const Mover& mover() const { return *mover_; }

  void move(const std::vector<Message>& sends, const std::vector<Message>& receives, std::int64_t tag,
            std::chrono::milliseconds timeout, const std::string& what) {
    require_alive();
    try {
      mover_->move(sends, receives, tag, timeout, what);
    } catch (const Error& error) {
      fail(error.kind(), error.what());
      throw;
    }
  }

  /// Calls match by their number: of all collectives, or of all messages from one rank to another.
  std::int64_t number(int source, int destination) {
    const std::lock_guard lock(mutex_);
    constexpr std::int64_t kTags = std::int64_t{1} << 29;
    const bool collective = source < 0;
    return 2 * (numbers_[{source, destination}]++ % kTags) + (collective ? 0 : 1);
  }

  void fail(ErrorKind kind, const std::string& reason) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failed_) failure_ = Failure{kind, reason};
    failed_ = true;
  }

  void require_alive() {
    const std::lock_guard lock(mutex_);
    if (failed_) throw Error(failure_.kind, failure_.reason);
  }

 private:
  struct Failure {
    ErrorKind kind = ErrorKind::kCommunication;
    std::string reason;
  };
  std::shared_ptr<Mover> mover_;
  int rank_;
  int size_;
  std::mutex mutex_;
  bool failed_ = false;
  Failure failure_;
  std::map<std::pair<int, int>, std::int64_t> numbers_;
};

std::vector<std::int64_t> even_shares(std::int64_t count, int ranks) {
  std::vector<std::int64_t> shares;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    shares.push_back((rank + 1) * count / ranks - rank * count / ranks);
  }
  return shares;
}

/// One call on its way.
class Carrier {
 public:
  Carrier(Link& link, const Call& call, std::int64_t tag, std::chrono::milliseconds timeout)
      : link_(link),
        call_(call),
        tag_(tag),
        timeout_(timeout),
        what_(describe(call)),
        element_(size_of(call.dtype)) {}

  void carry_out() {
    if (call_.kind == CallKind::kSend || call_.kind == CallKind::kReceive) return message();
    compare_calls();
    switch (call_.kind) {
      case CallKind::kAllReduce:
        return all_reduce();
      case CallKind::kReduceScatter:
        return reduce(call_.send_counts, static_cast<std::byte*>(call_.receive));
      case CallKind::kAllGather:
        return all_gather(static_cast<const std::byte*>(call_.send), call_.receive_counts);
      case CallKind::kAllToAll:
        return all_to_all();
      case CallKind::kBarrier:
        return;
      default:
        core::fail(ErrorKind::kUnsupported, "{}: ranks of a process group cannot do it", what_);
    }
  }

 private:
  void move(const std::vector<Message>& sends, const std::vector<Message>& receives) {
    link_.move(sends, receives, tag_, timeout_, what_);
  }

  /// So that a call that matches none is an error and no message goes into a buffer of another size.
  void compare_calls() {
    const auto size = static_cast<std::size_t>(link_.size());
    std::vector<std::uint64_t> mine(size);
    std::vector<std::uint64_t> theirs(size);
    std::vector<Message> sends;
    std::vector<Message> receives;
    for (std::size_t peer = 0; peer < size; ++peer) {
      mine[peer] = call_hash(call_.send_counts, static_cast<int>(peer));
      if (std::cmp_equal(peer, link_.rank())) continue;
      sends.push_back({static_cast<int>(peer), &mine[peer], sizeof mine[peer]});
      receives.push_back({static_cast<int>(peer), &theirs[peer], sizeof theirs[peer]});
    }
    move(sends, receives);
    for (std::size_t peer = 0; peer < size; ++peer) {
      if (std::cmp_equal(peer, link_.rank()) || theirs[peer] == expected_hash(static_cast<int>(peer)))
        continue;
      const std::string text =
          fmt::format("rank {} makes another call than {} of rank {}", peer, what_, link_.rank());
      link_.fail(ErrorKind::kCommunication, text);
      throw Error(ErrorKind::kCommunication, text);
    }
  }

  /// All-to-all: of the pair's count alone, since the others need not agree.
  [[nodiscard]] std::uint64_t call_hash(const std::vector<std::int64_t>& counts, int peer) const {
    plan::AgreementHash hash;
    hash.add(static_cast<std::int64_t>(call_.kind));
    hash.add(static_cast<std::int64_t>(call_.dtype));
    if (call_.kind == CallKind::kAllToAll) {
      hash.add(counts[static_cast<std::size_t>(peer)]);
    } else {
      for (const std::int64_t count : call_.send_counts) hash.add(count);
      for (const std::int64_t count : call_.receive_counts) hash.add(count);
    }
    return hash.value();
  }

  [[nodiscard]] std::uint64_t expected_hash(int peer) const { return call_hash(call_.receive_counts, peer); }

  [[nodiscard]] Message part(int peer, const void* base, std::int64_t offset, std::int64_t count) const {
    return {peer, static_cast<const std::byte*>(base) + offset * element_, count * element_};
  }

  void message() {
    const Message whole{
        call_.peer, call_.kind == CallKind::kSend ? call_.send : call_.receive,
        (call_.kind == CallKind::kSend ? call_.send_counts : call_.receive_counts)[0] * element_};
    if (whole.bytes == 0) return;
    if (call_.kind == CallKind::kSend) {
      move({whole}, {});
    } else {
      move({}, {whole});
    }
  }

  void all_reduce() {
    const std::vector<std::int64_t> shares = even_shares(call_.send_counts[0], link_.size());
    auto* receive = static_cast<std::byte*>(call_.receive);
    std::byte* mine = receive + offset_of(shares, link_.rank()) * element_;
    reduce(shares, mine);
    all_gather(mine, shares);
  }

  [[nodiscard]] static std::int64_t offset_of(const std::vector<std::int64_t>& counts, int rank) {
    return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  }

  /// Everybody's chunk for this rank, summed in rank order.
  void reduce(const std::vector<std::int64_t>& counts, std::byte* to) {
    const std::int64_t own = counts[static_cast<std::size_t>(link_.rank())];
    std::vector<std::byte> scratch(static_cast<std::size_t>(own * element_ * link_.size()));
    std::vector<const std::byte*> from;
    std::vector<Message> sends;
    std::vector<Message> receives;
    std::int64_t offset = 0;
    for (int rank = 0; rank < link_.size(); ++rank) {
      const std::int64_t count = counts[static_cast<std::size_t>(rank)];
      std::byte* place = scratch.data() + rank * own * element_;
      if (rank == link_.rank()) {
        from.push_back(static_cast<const std::byte*>(call_.send) + offset * element_);
      } else {
        if (count > 0) sends.push_back(part(rank, call_.send, offset, count));
        if (own > 0) receives.push_back(part(rank, place, 0, own));
        from.push_back(place);
      }
      offset += count;
    }
    move(sends, receives);
    if (own > 0) comm::sum_in_rank_order(from, std::array{to}, call_.dtype, own);
  }

  void all_gather(const std::byte* mine, const std::vector<std::int64_t>& counts) {
    const std::int64_t own = counts[static_cast<std::size_t>(link_.rank())];
    std::vector<Message> sends;
    std::vector<Message> receives;
    std::int64_t offset = 0;
    for (int rank = 0; rank < link_.size(); ++rank) {
      const std::int64_t count = counts[static_cast<std::size_t>(rank)];
      if (rank == link_.rank()) {
        copy(static_cast<std::byte*>(call_.receive) + offset * element_, mine, own);
      } else {
        if (own > 0) sends.push_back(part(rank, mine, 0, own));
        if (count > 0) receives.push_back(part(rank, call_.receive, offset, count));
      }
      offset += count;
    }
    move(sends, receives);
  }

  void all_to_all() {
    std::vector<Message> sends;
    std::vector<Message> receives;
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (int rank = 0; rank < link_.size(); ++rank) {
      const std::int64_t out = call_.send_counts[static_cast<std::size_t>(rank)];
      const std::int64_t in = call_.receive_counts[static_cast<std::size_t>(rank)];
      if (rank == link_.rank()) {
        copy(static_cast<std::byte*>(call_.receive) + received * element_,
             static_cast<const std::byte*>(call_.send) + sent * element_, out);
      } else {
        if (out > 0) sends.push_back(part(rank, call_.send, sent, out));
        if (in > 0) receives.push_back(part(rank, call_.receive, received, in));
      }
      sent += out;
      received += in;
    }
    move(sends, receives);
  }

  void copy(std::byte* to, const std::byte* from, std::int64_t count) const {
    if (to != from && count > 0) std::memmove(to, from, static_cast<std::size_t>(count * element_));
  }

  Link& link_;
  const Call& call_;
  std::int64_t tag_;
  std::chrono::milliseconds timeout_;
  std::string what_;
  std::int64_t element_;
};

class ProcessGroupCall final : public comm::QueuedCall {
 public:
  ProcessGroupCall(std::shared_ptr<Link> link, Call call, std::int64_t tag, std::chrono::milliseconds timeout)
      : link_(std::move(link)), call_(std::move(call)), tag_(tag), timeout_(timeout) {}
  ~ProcessGroupCall() override {
    if (!made_) link_->fail(ErrorKind::kCommunication, "a stream dropped " + describe(call_));
  }

  void make() override {
    made_ = true;
    Carrier(*link_, call_, tag_, timeout_).carry_out();
  }

 private:
  std::shared_ptr<Link> link_;
  Call call_;
  std::int64_t tag_;
  std::chrono::milliseconds timeout_;
  bool made_ = false;
};

class ProcessGroupCommunicator final : public comm::HostCommunicator {
 public:
  ProcessGroupCommunicator(std::shared_ptr<Link> link, std::vector<int> members, bool is_whole,
                           std::chrono::milliseconds timeout)
      : HostCommunicator(std::move(members), link->rank(), is_whole, timeout), link_(std::move(link)) {}

  [[nodiscard]] std::string_view name() const override { return "process-group"; }
  void abort(const std::string& reason) noexcept override {
    link_->fail(ErrorKind::kCommunication, "this rank aborted: " + reason);
  }

 protected:
  std::shared_ptr<comm::QueuedCall> queue(Call call, const std::vector<int>& ranks) override {
    link_->require_alive();
    const std::int64_t tag = ranks.empty() ? link_->number(-1, -1) : link_->number(ranks[0], ranks[1]);
    if (call.peer >= 0) call.peer = ranks[0] == rank() ? ranks[1] : ranks[0];
    return std::make_shared<ProcessGroupCall>(link_, std::move(call), tag, timeout());
  }

  std::vector<std::string> exchange_now(Call call) override {
    const std::int64_t tag = link_->number(-1, -1);
    const auto size_now = static_cast<std::size_t>(size());
    std::vector<std::uint64_t> lengths(size_now, call.payload.size());
    const std::uint64_t length = call.payload.size();
    std::vector<std::string> payloads(size_now);
    std::vector<Message> sends;
    std::vector<Message> receives;
    const auto for_peers = [&](const auto& add) {
      sends.clear();
      receives.clear();
      for (std::size_t peer = 0; peer < size_now; ++peer) {
        if (!std::cmp_equal(peer, rank())) add(peer, static_cast<int>(peer));
      }
      link_->move(sends, receives, tag, timeout(), describe(call));
    };
    for_peers([&](std::size_t peer, int to) {
      sends.push_back({to, &length, sizeof length});
      receives.push_back({to, &lengths[peer], sizeof length});
    });
    constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 32;
    for_peers([&](std::size_t peer, int to) {
      if (lengths[peer] > kMostBytes) {
        core::fail(ErrorKind::kCommunication, "rank {} makes another call than {}", peer, describe(call));
      }
      payloads[peer].resize(lengths[peer]);
      if (length > 0) sends.push_back({to, call.payload.data(), static_cast<std::int64_t>(length)});
      if (lengths[peer] > 0)
        receives.push_back({to, payloads[peer].data(), static_cast<std::int64_t>(lengths[peer])});
    });
    payloads[static_cast<std::size_t>(rank())] = call.payload;
    return payloads;
  }

  std::shared_ptr<Communicator> subgroup_now(Call call, const std::vector<int>& /*sorted*/) override {
    const std::vector<std::int64_t>& listed = call.send_counts;
    std::vector<int> members_of_group;
    for (const std::int64_t listed_rank : listed) {
      members_of_group.push_back(members()[static_cast<std::size_t>(listed_rank)]);
    }
    const auto new_rank = static_cast<int>(std::find(listed.begin(), listed.end(), rank()) - listed.begin());
    auto link =
        std::make_shared<Link>(link_->mover().subgroup(listed), new_rank, static_cast<int>(listed.size()));
    return std::make_shared<ProcessGroupCommunicator>(std::move(link), std::move(members_of_group), false,
                                                      timeout());
  }

  [[nodiscard]] std::function<void(const std::string&)> aborter() const override {
    return [link = link_](const std::string& reason) { link->fail(ErrorKind::kCommunication, reason); };
  }

 private:
  std::shared_ptr<Link> link_;
};

std::shared_ptr<Communicator> make_process_group_communicator(nb::object backend, int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size) {
    core::fail(ErrorKind::kBadArgument, "rank {} of {} is no place in a process group", rank, size);
  }
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  constexpr std::chrono::milliseconds kStandard{60'000};
  return std::make_shared<ProcessGroupCommunicator>(
      std::make_shared<Link>(std::make_shared<Mover>(std::move(backend)), rank, size), std::move(members),
      true, comm::timeout_or_environment(kStandard, kStandard));
}

}  // namespace

void bind_process_group(nb::module_& module) {
  module.def("make_process_group_communicator", make_process_group_communicator, nb::arg("backend"),
             nb::arg("rank"), nb::arg("size"));
}

}  // namespace flashoverlap::python
