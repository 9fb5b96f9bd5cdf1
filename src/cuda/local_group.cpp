#include "local_group.h"

#include <algorithm>

#include "check.h"
#include "comm/meeting_pause.h"
#include "core/fail.h"

namespace flashoverlap::cuda {
namespace {

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

}  // namespace

LocalGroup::LocalGroup(std::vector<int> devices, std::chrono::milliseconds timeout)
    : devices_(std::move(devices)),
      timeout_ms_(timeout.count()),
      calls_(devices_.size()),
      arrivals_(devices_.size()) {
  for (const int device : devices_) {
    const DeviceScope scope(device);
    ready_.emplace_back();
    done_.emplace_back();
  }
}

LocalMember::LocalMember(std::shared_ptr<LocalGroup> group, int rank)
    : group_(std::move(group)), rank_(rank) {
  enable_peers();
}

void LocalMember::enable_peers() const {
  const int device = group_->devices_[index(rank_)];
  const DeviceScope scope(device);
  for (const int peer : group_->devices_) {
    if (peer == device) continue;
    int reachable = 0;
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceCanAccessPeer(&reachable, device, peer));
    if (reachable == 0) {
      core::fail(ErrorKind::kUnsupported, "device {} cannot address the memory of device {}: use NCCL",
                 device, peer);
    }
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      FLASHOVERLAP_CUDA_CHECK(status);
    }
  }
}

const Event& LocalMember::ready(int rank) const {
  return group_->ready_[index(rank)];
}

const Event& LocalMember::done(int rank) const {
  return group_->done_[index(rank)];
}

void LocalMember::fail(const Failure& failure) noexcept {
  try {
    group_->board_.set(failure);
  } catch (...) {  // out of memory for the text: the failure matters more
    group_->board_.set({});
  }
}

void LocalMember::throw_if_failed() {
  if (const auto failure = group_->board_.get()) throw Error(failure->kind, failure->reason);
}

const std::vector<PeerCall>& LocalMember::meet(PeerCall call) {
  throw_if_failed();
  group_->calls_[index(rank_)] = std::move(call);
  wait_for_all();
  if (std::string why = mismatch(group_->calls_); !why.empty()) {
    fail({ErrorKind::kCommunication, std::move(why)});
    throw_if_failed();
  }
  return group_->calls_;
}

void LocalMember::wait_for_all() {
  using Clock = std::chrono::steady_clock;
  auto& arrivals = group_->arrivals_;
  const std::uint64_t mine = arrivals[index(rank_)].load(std::memory_order_relaxed) + 1;
  arrivals[index(rank_)].store(mine, std::memory_order_release);
  const auto begin = Clock::now();
  const auto all_here = [&] {
    return std::all_of(arrivals.begin(), arrivals.end(),
                       [&](const auto& arrival) { return arrival.load(std::memory_order_acquire) >= mine; });
  };
  while (!all_here()) {
    throw_if_failed();
    const auto waited = Clock::now() - begin;
    if (waited > timeout()) fail_for_missing();
    comm::pause_in_meeting(waited);
  }
}

void LocalMember::fail_for_missing() {
  const std::uint64_t mine = group_->arrivals_[index(rank_)].load(std::memory_order_relaxed);
  std::string missing;
  for (int r = 0; r < size(); ++r) {
    if (group_->arrivals_[index(r)].load(std::memory_order_acquire) < mine)
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
  }
  fail({ErrorKind::kTimeout,
        fmt::format("local {} on rank {} of {}: rank {} did not come within {} ms",
                    describe(group_->calls_[index(rank_)]), rank_, size(), missing, timeout().count())});
  throw_if_failed();
}

// The first rank of the list makes the group; the others copy the pointer to it while it waits in the second
// exchange.
std::shared_ptr<PeerGroup> LocalMember::subgroup(Communicator& control, std::span<const int> ranks) {
  std::shared_ptr<LocalGroup> group;
  if (control.rank() == 0) {
    std::vector<int> devices;
    for (const int r : ranks) devices.push_back(group_->devices_[index(r)]);
    group = std::make_shared<LocalGroup>(std::move(devices), timeout());
  }
  constexpr TransferLabel kLabel{.operation = "local subgroup"};
  const auto address = control.exchange(reinterpret_cast<std::uintptr_t>(&group), kLabel).front();
  if (control.rank() != 0) group = *reinterpret_cast<std::shared_ptr<LocalGroup>*>(address);
  (void)control.exchange(std::uint64_t{0}, kLabel);
  return std::make_shared<LocalMember>(std::move(group), control.rank());
}

}  // namespace flashoverlap::cuda
