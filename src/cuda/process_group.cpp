#include "process_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "check.h"
#include "comm/run_on_all.h"
#include "core/fail.h"
#include "peer_kernels.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::string_view kWhat = "memory shared between processes";
constexpr std::size_t kMaxMessages = 256;

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

template <std::size_t kSize>
void copy_text(std::array<char, kSize>& to, std::string_view text) {
  text = text.substr(0, kSize - 1);
  std::copy(text.begin(), text.end(), to.begin());
  to[text.size()] = '\0';
}

// Bytes of a handle as text to exchange, and back.
template <class Handle>
std::string bytes_of(const Handle& handle) {
  return {reinterpret_cast<const char*>(&handle), sizeof handle};
}
template <class Handle>
Handle from_bytes(const std::string& bytes) {
  Handle handle;
  std::memcpy(&handle, bytes.data(), sizeof handle);
  return handle;
}

void require_processes(Communicator& control) {
  const std::vector<std::uint64_t> processes =
      control.exchange(static_cast<std::uint64_t>(getpid()), {.operation = kWhat});
  for (std::size_t r = 1; r < processes.size(); ++r) {
    const auto first = std::find(processes.begin(), processes.end(), processes[r]) - processes.begin();
    if (first == static_cast<std::ptrdiff_t>(r)) continue;
    core::fail(ErrorKind::kUnsupported,
               "local: ranks {} and {} are threads of one process ({}); make_local_gpu_communicators is for "
               "those",
               first, r, processes[r]);
  }
}

}  // namespace

/// A PeerCall as it lies in shared memory.
struct ProcessGroup::SharedCall {
  struct Message {
    std::int32_t peer;
    std::int64_t count;
    SharedAddress data;
  };
  std::array<char, 32> kind;
  std::array<char, 256> operation;
  std::int64_t group, transfer, slice;
  DType dtype;
  SharedAddress send, receive;
  std::uint32_t num_send_counts, num_receive_counts, num_sends, num_receives;
  std::array<std::int64_t, kMaxPeerRanks> send_counts, receive_counts;
  std::array<Message, kMaxMessages> sends, receives;
};

ProcessGroup::ProcessGroup(Communicator& control, int device, std::chrono::milliseconds timeout)
    : device_(device),
      meeting_(control, sizeof(SharedCall), timeout),
      calls_(index(meeting_.size())),
      texts_(index(meeting_.size())) {
  static_assert(std::is_trivially_copyable_v<SharedCall>, "or it could not lie in shared memory");
  require_processes(control);
  const DeviceScope scope(device);
  share_events(control);
  try_memory(control);
}

ProcessGroup::~ProcessGroup() = default;

ProcessGroup::SharedCall& ProcessGroup::slot(int rank) const {
  return *reinterpret_cast<SharedCall*>(meeting_.slot(rank));
}

void ProcessGroup::share_events(Communicator& control) {
  for (std::vector<Event>* const events : {&ready_, &done_}) {
    Event own;
    cudaIpcEventHandle_t handle{};
    comm::run_on_all(control, kWhat, [&] {
      own = Event::for_processes();
      FLASHOVERLAP_CUDA_CHECK(cudaIpcGetEventHandle(&handle, own.get()));
    });
    const std::vector<std::string> handles = control.exchange(bytes_of(handle), {.operation = kWhat});
    comm::run_on_all(control, kWhat, [&] {
      for (int r = 0; r < size(); ++r) {
        events->push_back(r == meeting_.rank()
                              ? std::move(own)
                              : Event::of_process(from_bytes<cudaIpcEventHandle_t>(handles[index(r)])));
      }
    });
  }
}

// Whether devices can address each other's memory shows now, not in the middle of a call.
void ProcessGroup::try_memory(Communicator& control) {
  SharedAddress address;
  comm::run_on_all(control, kWhat, [&] {
    probe_ = DeviceBuffer(device_, 256, kWhat, DeviceMemory::kShareable);
    address = memory_.share(probe_.data());
  });
  const std::vector<std::string> addresses = control.exchange(bytes_of(address), {.operation = kWhat});
  comm::run_on_all(control, kWhat, [&] {
    for (int r = 0; r < size(); ++r) {
      if (r != meeting_.rank()) (void)memory_.open(r, from_bytes<SharedAddress>(addresses[index(r)]));
    }
  });
}

void ProcessGroup::write(const PeerCall& call) {
  if (call.sends.size() > kMaxMessages || call.receives.size() > kMaxMessages) {
    core::fail(ErrorKind::kUnsupported, "{}: {} messages sent and {} received in one call; at most {}",
               describe(call), call.sends.size(), call.receives.size(), kMaxMessages);
  }
  SharedCall& to = slot(meeting_.rank());
  copy_text(to.kind, call.kind);
  copy_text(to.operation, call.label.operation);
  to.group = call.label.group;
  to.transfer = call.label.transfer;
  to.slice = call.label.slice;
  to.dtype = call.dtype;
  const bool has_data = std::ranges::any_of(call.send_counts, [](std::int64_t count) { return count > 0; });
  to.send = memory_.share(has_data ? call.send : nullptr);
  to.receive = memory_.share(has_data ? call.receive : nullptr);
  to.num_send_counts = static_cast<std::uint32_t>(call.send_counts.size());
  std::ranges::copy(call.send_counts, to.send_counts.begin());
  to.num_receive_counts = static_cast<std::uint32_t>(call.receive_counts.size());
  std::ranges::copy(call.receive_counts, to.receive_counts.begin());
  to.num_sends = static_cast<std::uint32_t>(call.sends.size());
  for (std::size_t i = 0; i < call.sends.size(); ++i) {
    const PeerMessage& message = call.sends[i];
    to.sends[i] = {message.peer, message.count,
                   message.count > 0 ? memory_.share(message.data) : SharedAddress{}};
  }
  to.num_receives = static_cast<std::uint32_t>(call.receives.size());
  for (std::size_t i = 0; i < call.receives.size(); ++i)
    to.receives[i] = {call.receives[i].peer, call.receives[i].count, {}};
}

PeerCall ProcessGroup::read(int rank) {
  const SharedCall& from = slot(rank);
  Texts& texts = texts_[index(rank)];
  texts = {from.kind.data(), from.operation.data()};
  PeerCall call;
  call.kind = texts.kind;
  call.send = memory_.open(rank, from.send);
  call.receive = memory_.open(rank, from.receive);
  call.send_counts.assign(from.send_counts.begin(), from.send_counts.begin() + from.num_send_counts);
  call.receive_counts.assign(from.receive_counts.begin(),
                             from.receive_counts.begin() + from.num_receive_counts);
  call.dtype = from.dtype;
  call.label = {texts.operation, from.group, from.transfer, from.slice};
  for (std::uint32_t i = 0; i < from.num_sends; ++i) {
    const SharedCall::Message& message = from.sends[i];
    const bool is_for_this = message.peer == meeting_.rank();
    call.sends.push_back(
        {message.peer, is_for_this ? memory_.open(rank, message.data) : nullptr, message.count});
  }
  for (std::uint32_t i = 0; i < from.num_receives; ++i)
    call.receives.push_back({from.receives[i].peer, nullptr, from.receives[i].count});
  return call;
}

void ProcessGroup::read_others() {
  for (int r = 0; r < size(); ++r) {
    if (r != meeting_.rank()) calls_[index(r)] = read(r);
  }
}

const std::vector<PeerCall>& ProcessGroup::meet(PeerCall call) {
  throw_if_failed();
  const std::string what = describe(call);
  const auto or_fail = [&](auto&& step) {
    try {
      step();
    } catch (const Error& error) {  // the others must not wait for this rank
      meeting_.fail(error.kind(),
                    fmt::format("local {} on rank {}: {}", what, meeting_.rank(), error.what()));
      throw_if_failed();
      throw;
    }
  };
  or_fail([&] { write(call); });
  meeting_.meet([&] { return "local " + what; });
  calls_[index(meeting_.rank())] = std::move(call);
  or_fail([&] {
    read_others();
    if (memory_.took_back()) read_others();
    if (memory_.took_back()) {
      core::fail(ErrorKind::kUnsupported,
                 "memory of other ranks cannot be addressed from here all at a time: each must come from a "
                 "cudaMalloc of at least 2 MiB");
    }
    if (const std::string why = mismatch(calls_); !why.empty())
      core::fail(ErrorKind::kCommunication, "{}", why);
  });
  return calls_;
}

void ProcessGroup::meet_again() {
  meeting_.meet([&] { return "local " + describe(calls_[index(meeting_.rank())]); });
}

const Event& ProcessGroup::ready(int rank) const {
  return ready_[index(rank)];
}

const Event& ProcessGroup::done(int rank) const {
  return done_[index(rank)];
}

std::shared_ptr<PeerGroup> ProcessGroup::subgroup(Communicator& control, std::span<const int> /*ranks*/) {
  return std::make_shared<ProcessGroup>(control, device_, timeout());
}

}  // namespace flashoverlap::cuda
