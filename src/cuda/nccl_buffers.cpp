// Memory that an NCCL communicator has registered: what the executor's transfers move.
#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "comm/run_on_all.h"
#include "core/fail.h"
#include "nccl_communicator.h"
#include "nccl_library.h"
#include "runtime_library.h"

namespace flashoverlap::cuda {
namespace {

constexpr TransferLabel kLabel{.operation = "nccl registration"};
// Of a rank's message in the calls that warm a block up: large enough for the protocol that copies straight
// into registered memory.
constexpr std::int64_t kWarmUpCount = 32'768;
// ncclMemAlloc takes whole pages of the device.
constexpr std::int64_t kPage = std::int64_t{2} << 20;

std::string_view name_of(NcclBuffers buffers) {
  switch (buffers) {
    case NcclBuffers::kPlain:
      return "plain";
    case NcclBuffers::kRegistered:
      return "registered";
    case NcclBuffers::kSymmetric:
      return "symmetric";
  }
  return "?";
}

}  // namespace

void NcclCommunicator::check_buffers() const {
  const NcclLibrary& library = nccl();
  const bool can_register = library.mem_alloc != nullptr && library.mem_free != nullptr &&
                            library.comm_register != nullptr && library.comm_deregister != nullptr;
  const bool has_windows =
      library.comm_window_register != nullptr && library.comm_window_deregister != nullptr;
  const bool has_all = can_register && has_windows && library.comm_revoke != nullptr;
  if (buffers() == NcclBuffers::kPlain || has_all) return;
  core::fail(ErrorKind::kUnsupported, "{} buffers need NCCL {} or later, this is {} ({})", name_of(buffers()),
             library_version_text(kNcclBuffersVersion), library_version_text(library.version), library.path);
}

void NcclCommunicator::agree_on_buffers() {
  const std::vector<std::uint64_t> all =
      control_->exchange(static_cast<std::uint64_t>(options_.buffers), kLabel);
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    core::fail(ErrorKind::kBadArgument, "NcclOptions::buffers is {} on rank 0 and {} on rank {}",
               name_of(static_cast<NcclBuffers>(all[0])), name_of(static_cast<NcclBuffers>(all[r])), r);
  }
}

// With memory that nobody keeps: so whether NCCL can register any is said at once, and what it makes for the
// first is made.
void NcclCommunicator::try_registration() {
  try {
    std::shared_ptr<const DeviceBuffer> memory;
    reserve(memory, 1, "the warm-up of registered memory");
  } catch (const Error&) {  // on every rank
    close();
    throw;
  }
}

void NcclCommunicator::reserve(std::shared_ptr<const DeviceBuffer>& held, std::int64_t bytes,
                               const std::string& purpose) {
  if (held != nullptr && held->bytes() >= bytes) return;
  // At least half as much again, so that calls which grow little by little seldom come here.
  const std::int64_t grown = held == nullptr ? 0 : held->bytes() / 2 * 3;
  const std::int64_t warmed_up = 2 * kWarmUpCount * size_ * size_of(DType::kFloat32);
  const std::int64_t size = (std::max({bytes, grown, warmed_up}) + kPage - 1) / kPage * kPage;
  held.reset();
  release_unused();
  Registered block;
  comm::run_on_all(*this, purpose, [&] {
    block.memory = std::make_shared<const DeviceBuffer>(options_.device, size, purpose, DeviceMemory::kNccl);
  });
  try {
    comm::run_on_all(*this, purpose, [&] { register_memory(block); });
  } catch (const Error&) {  // on another rank, where this one has a handle
    if (block.handle != nullptr) deregister(block);
    throw;
  }
  {
    const std::scoped_lock lock(registered_mutex_);
    registered_.push_back(block);
  }
  // NCCL opens what is registered in the first call that uses it, and that must not be one behind a stream
  // that waits.
  call_every_kind(block.memory->data(), kWarmUpCount);
  held = std::move(block.memory);
}

// What nobody holds, on no rank. What is in the streams now needs nobody's host any more, and no rank goes on
// before all have come to the next step, so here it does no harm if freeing waits for the devices.
void NcclCommunicator::release_unused() {
  std::string unused;
  for (const Registered& block : registered_) unused += block.memory.use_count() == 1 ? '1' : '0';
  const std::vector<std::string> all = exchange(unused, kLabel);
  std::vector<Registered> released;
  {
    const std::scoped_lock lock(registered_mutex_);
    std::size_t index = 0;
    std::erase_if(registered_, [&](const Registered& block) {
      const std::size_t at = index++;
      if (std::ranges::any_of(all, [&](const std::string& rank) { return rank[at] == '0'; })) return false;
      released.push_back(block);
      return true;
    });
  }
  for (const Registered& block : released) deregister(block);
}

void NcclCommunicator::register_memory(Registered& block) {
  const std::unique_ptr<Stream> stream = make_stream("registration");
  void* const data = block.memory->data();
  const auto bytes = static_cast<std::size_t>(block.memory->bytes());
  if (buffers() == NcclBuffers::kRegistered) {
    run("ncclCommRegister", *stream, kLabel, [&](ncclComm_t comm, cudaStream_t) {
      return nccl().comm_register(comm, data, bytes, &block.handle);
    });
  } else {
    run("ncclCommWindowRegister", *stream, kLabel, [&](ncclComm_t comm, cudaStream_t) {
      return nccl().comm_window_register(comm, data, bytes, &block.handle, kNcclSymmetricWindow);
    });
  }
  if (block.handle != nullptr) return;
  core::fail(ErrorKind::kUnsupported,
             "NCCL {} opens no {} buffers here: not all GPUs can map each other's memory, or one of "
             "NCCL_CUMEM_ENABLE, NCCL_LOCAL_REGISTER and NCCL_WIN_ENABLE is 0",
             library_version_text(nccl().version), name_of(buffers()));
}

void NcclCommunicator::deregister(const Registered& block) {
  const std::scoped_lock lock(mutex_);
  if (aborted_) return;  // the abort did it
  if (buffers() == NcclBuffers::kRegistered) {
    (void)nccl().comm_deregister(comm_, block.handle);
  } else {
    (void)nccl().comm_window_deregister(comm_, block.handle);
  }
}

// ncclCommAbort gives back what is registered together with the other ranks, and waits for those that are
// gone (seen with NCCL 2.30.7 on two H200s). So the communicator is revoked, which ends what is on the
// device; it and the memory that it knows stay until the process ends.
void NcclCommunicator::abort_with_registered() noexcept {
  (void)nccl().comm_revoke(comm_, 0);
  const std::scoped_lock lock(registered_mutex_);
  (void)new (std::nothrow) std::vector<Registered>(std::move(registered_));
}

}  // namespace flashoverlap::cuda
