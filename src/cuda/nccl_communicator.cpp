#include "nccl_communicator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <future>
#include <numeric>
#include <random>
#include <thread>

#include "check.h"
#include "comm/run_on_all.h"
#include "core/fail.h"
#include "core/host_name.h"
#include "nccl_library.h"
#include "runtime_library.h"

namespace flashoverlap::cuda {
namespace {

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kFloat16:
      return ncclFloat16;
  }
  core::fail(ErrorKind::kInternal, "an element type without an NCCL type");
}

const char* at(const void* base, std::int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * size_of(dtype);
}

char* at(void* base, std::int64_t elements, DType dtype) {
  return static_cast<char*>(base) + elements * size_of(dtype);
}

std::size_t as_size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

bool all_equal(std::span<const std::int64_t> counts) {
  return std::all_of(counts.begin(), counts.end(),
                     [&](std::int64_t count) { return count == counts.front(); });
}

std::string describe(const char* call, const TransferLabel& label, int rank, int size) {
  std::string text = fmt::format("nccl {} on rank {} of {}", call, rank, size);
  if (!label.operation.empty()) text += fmt::format(" for {}", label.operation);
  if (label.group >= 0) text += fmt::format(", group {}", label.group);
  if (label.transfer >= 0) text += fmt::format(", transfer {}", label.transfer);
  if (label.slice >= 0) text += fmt::format(", slice {}", label.slice);
  return text;
}

// Tells processes apart, on whatever hosts they are.
std::uint64_t process_mark() {
  static const std::uint64_t mark = [] {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32U) ^ device();
  }();
  return mark;
}

constexpr std::chrono::milliseconds kStartTimeout{60'000};
constexpr TransferLabel kRendezvous{.operation = "nccl rendezvous"};

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<Communicator> control, const NcclOptions& options)
    : control_(std::move(control)), options_(options), rank_(control_->rank()), size_(control_->size()) {
  if (options_.max_ctas < 0)
    core::fail(ErrorKind::kBadArgument, "max_ctas is {}, must be >= 0", options_.max_ctas);
  // A rank that cannot go on must say so before the others enter NCCL, where they would wait for it.
  const auto on_all = [&](const std::function<void()>& step) { comm::run_on_all(*control_, "nccl", step); };
  on_all([&] {
    require_device(options_.device);
    check_buffers();
    const DeviceScope scope(options_.device);
    FLASHOVERLAP_CUDA_CHECK(cudaFree(nullptr));
    barrier_word_ = DeviceBuffer(options_.device, 64, "the barrier of an NCCL communicator");
  });
  on_all([&] { agree_on_buffers(); });
  on_all([&] { agree_on_devices(); });
  share_board();
  on_all([&] { initialise(); });
  // NCCL's own rendezvous and the first calls, in which it connects the ranks, may take longer than a
  // caller's short time-out, and a communicator that is aborted while the host is inside NCCL may hang there
  // (seen with 2.30.7 and 3 ranks on one GPU).
  watchdog_ = std::make_unique<Watchdog>(
      options_.device, std::max(options_.timeout, kStartTimeout), board_, [this] { return async_error(); },
      [this](const Failure& failure) { fail_with(failure); });
  warm_up();
  if (buffers() != NcclBuffers::kPlain) try_registration();
  watchdog_->set_timeout(options_.timeout);
}

NcclCommunicator::~NcclCommunicator() {
  close();
}

void NcclCommunicator::close() {
  watchdog_.reset();
  if (comm_ == nullptr || aborted_) return;
  for (const Registered& block : registered_) deregister(block);
  (void)nccl().comm_destroy(comm_);
}

void NcclCommunicator::agree_on_devices() {
  char bus[32] = {};
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, options_.device));
  const std::vector<std::string> all = control_->exchange(core::host_name() + " " + bus, kRendezvous);
  for (std::size_t r = 0; r < all.size(); ++r) {
    const auto twin = std::find(all.begin() + static_cast<std::ptrdiff_t>(r) + 1, all.end(), all[r]);
    if (twin == all.end()) continue;
    if (buffers() != NcclBuffers::kPlain) {
      core::fail(
          ErrorKind::kUnsupported,
          "ranks {} and {} share the GPU {}: memory cannot be registered there, use NcclBuffers::kPlain", r,
          twin - all.begin(), all[r]);
    }
    // NVLink multicast has no meaning within one GPU; what the environment says stays.
    (void)setenv("NCCL_NVLS_ENABLE", "0", 0);
    if (nccl().version < kNcclSharedGpuVersion) {
      core::fail(ErrorKind::kUnsupported,
                 "ranks {} and {} share the GPU {}: that needs NCCL {} or later, this is {} ({})", r,
                 twin - all.begin(), all[r], library_version_text(kNcclSharedGpuVersion),
                 library_version_text(nccl().version), nccl().path);
    }
  }
}

void NcclCommunicator::share_board() {
  board_ = std::make_shared<FailureBoard>();
  // Ranks that are threads of one process share the board of the first of them; its address is good while
  // that rank keeps it, which it does at least until the exchange after this one.
  const auto mine = fmt::format("{} {}", process_mark(), reinterpret_cast<std::uintptr_t>(&board_));
  const std::vector<std::string> all = control_->exchange(mine, kRendezvous);
  const std::string prefix = fmt::format("{} ", process_mark());
  const auto first =
      std::find_if(all.begin(), all.end(), [&](const std::string& text) { return text.starts_with(prefix); });
  if (first - all.begin() != rank_) {
    board_ = *reinterpret_cast<std::shared_ptr<FailureBoard>*>(std::stoull(first->substr(prefix.size())));
  }
  (void)control_->exchange(std::uint64_t{0}, kRendezvous);
}

void NcclCommunicator::initialise() {
  ncclUniqueId id{};
  if (rank_ == 0) check(nccl().get_unique_id(&id), "ncclGetUniqueId");
  const std::string bytes =
      control_->exchange(std::string(id.internal, sizeof id.internal), kRendezvous).front();
  std::memcpy(id.internal, bytes.data(), std::min(bytes.size(), sizeof id.internal));

  struct Shared {
    ncclComm_t comm = nullptr;
    std::promise<ncclResult_t> done;
  };
  const auto shared = std::make_shared<Shared>();
  std::future<ncclResult_t> done = shared->done.get_future();
  // NCCL's rendezvous has no time-out of its own; when it does not come back, its thread is left behind.
  std::thread([shared, id, rank = rank_, size = size_, device = options_.device,
               max_ctas = options_.max_ctas] {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    if (max_ctas > 0) config.maxCTAs = max_ctas;
    const cudaError_t status = cudaSetDevice(device);
    shared->done.set_value(status == cudaSuccess
                               ? nccl().comm_init_rank_config(&shared->comm, size, id, rank, &config)
                               : ncclUnhandledCudaError);
  }).detach();
  const auto timeout = std::max(options_.timeout, kStartTimeout);
  if (done.wait_for(timeout) != std::future_status::ready) {
    core::fail(ErrorKind::kTimeout, "ncclCommInitRankConfig on rank {} of {} was not done after {} ms", rank_,
               size_, options_.timeout.count());
  }
  check(done.get(), "ncclCommInitRankConfig");
  comm_ = shared->comm;
}

void NcclCommunicator::warm_up() {
  constexpr std::int64_t kCount = 4096;
  const DeviceBuffer buffer(options_.device, 2 * kCount * size_ * size_of(DType::kFloat32),
                            "the warm-up of an NCCL communicator");
  call_every_kind(buffer.data(), kCount);
}

// Loads NCCL's kernels and connects the ranks for every kind of call, which cannot happen later behind a
// waiting stream. `memory`: two buffers of `count` float32 elements for each rank.
void NcclCommunicator::call_every_kind(void* memory, std::int64_t count) {
  const DeviceScope scope(options_.device);
  const std::int64_t all = count * size_;
  FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(memory, 0, as_size(2 * all * size_of(DType::kFloat32)),
                                          memory_stream(options_.device)));
  FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(memory_stream(options_.device)));
  auto* const from = static_cast<float*>(memory);
  float* const to = from + all;
  const std::vector<std::int64_t> equal(as_size(size_), count);
  std::vector<std::int64_t> uneven = equal;
  uneven.back() -= 8;
  const std::unique_ptr<Stream> stream = make_stream("warm-up");
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    all_reduce(from, to, all, dtype, *stream, kRendezvous);
    reduce_scatter(from, to, equal, dtype, *stream, kRendezvous);
    reduce_scatter(from, to, uneven, dtype, *stream, kRendezvous);
    all_gather(from, to, equal, dtype, *stream, kRendezvous);
    all_gather(from, to, uneven, dtype, *stream, kRendezvous);
    all_to_all(from, equal, to, equal, dtype, *stream, kRendezvous);
  }
  stream->synchronize();
}

std::unique_ptr<Stream> NcclCommunicator::make_stream(const std::string& /*name*/) {
  auto stream = std::make_unique<CudaStream>(options_.device, CudaStream::Priority::kHigh);
  stream->set_error_poll([this] { throw_if_failed(); });
  return stream;
}

void NcclCommunicator::check(ncclResult_t status, const char* call) const {
  if (status == ncclSuccess) return;
  const char* const detail = nccl().last_error(nullptr);
  core::fail(status == ncclInvalidArgument || status == ncclInvalidUsage ? ErrorKind::kBadArgument
                                                                         : ErrorKind::kCommunication,
             "{} on rank {} of {}: {}{}{}", call, rank_, size_, nccl().error_string(status),
             detail == nullptr || *detail == '\0' ? "" : ": ", detail == nullptr ? "" : detail);
}

void NcclCommunicator::check_counts(std::span<const std::int64_t> counts, const char* call) const {
  if (counts.size() != static_cast<std::size_t>(size_)) {
    core::fail(ErrorKind::kBadArgument, "{}: {} counts for {} ranks", call, counts.size(), size_);
  }
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (counts[r] < 0)
      core::fail(ErrorKind::kBadArgument, "{}: the count of rank {} is {}, must be >= 0", call, r, counts[r]);
  }
}

void NcclCommunicator::throw_if_failed() const {
  if (const auto failure = board_->get()) throw Error(failure->kind, failure->reason);
}

std::optional<Failure> NcclCommunicator::async_error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || aborted_) return std::nullopt;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t status = nccl().comm_get_async_error(comm_, &state);
  if (status != ncclSuccess) state = status;
  if (state == ncclSuccess || state == ncclInProgress) return std::nullopt;
  return Failure{ErrorKind::kCommunication,
                 fmt::format("nccl on rank {} of {}: {}", rank_, size_, nccl().error_string(state))};
}

void NcclCommunicator::abort_comm() noexcept {
  if (buffers() == NcclBuffers::kPlain) {
    (void)nccl().comm_abort(comm_);
  } else {
    abort_with_registered();
  }
}

void NcclCommunicator::fail_with(const Failure& failure) noexcept {
  board_->set(failure);
  if (aborted_.exchange(true)) return;
  std::unique_lock lock(mutex_, std::defer_lock);
  // Whoever holds the lock longer than this hangs inside NCCL, and the abort is what frees it.
  for (int i = 0; i < 100 && !lock.try_lock(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (comm_ != nullptr) abort_comm();
  control_->abort(failure.reason);
}

void NcclCommunicator::abort(const std::string& reason) noexcept {
  try {
    fail_with({ErrorKind::kCommunication, fmt::format("rank {} aborted: {}", rank_, reason)});
  } catch (...) {  // out of memory for the text: the abort matters more
    fail_with({});
  }
}

void NcclCommunicator::set_timeout(std::chrono::milliseconds timeout) {
  options_.timeout = timeout;
  watchdog_->set_timeout(timeout);
  control_->set_timeout(timeout);
}

std::chrono::milliseconds NcclCommunicator::timeout() const {
  return options_.timeout;
}

std::vector<std::uint64_t> NcclCommunicator::exchange(std::uint64_t value, const TransferLabel& label) {
  throw_if_failed();
  return control_->exchange(value, label);
}

std::vector<std::string> NcclCommunicator::exchange(const std::string& bytes, const TransferLabel& label) {
  throw_if_failed();
  return control_->exchange(bytes, label);
}

std::shared_ptr<Communicator> NcclCommunicator::subgroup(std::span<const int> ranks) {
  throw_if_failed();
  return std::make_shared<NcclCommunicator>(control_->subgroup(ranks), options_);
}

cudaStream_t NcclCommunicator::begin_call(const char* call, Stream& stream, const TransferLabel& label) {
  throw_if_failed();
  const cudaStream_t cuda_stream = cuda_stream_of(stream, call);
  watchdog_->begin(cuda_stream, describe(call, label, rank_, size_));
  return cuda_stream;
}

void NcclCommunicator::end_call(ncclResult_t status, const char* call, cudaStream_t stream) {
  throw_if_failed();
  check(status, call);
  watchdog_->end(stream);
}

void NcclCommunicator::all_reduce(const void* send, void* receive, std::int64_t count, DType dtype,
                                  Stream& stream, const TransferLabel& label) {
  if (count < 0) core::fail(ErrorKind::kBadArgument, "all_reduce: count is {}, must be >= 0", count);
  if (count == 0) return;
  run("ncclAllReduce", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
    return nccl().all_reduce(send, receive, as_size(count), nccl_type(dtype), ncclSum, comm, on);
  });
}

void NcclCommunicator::reduce_scatter(const void* send, void* receive, std::span<const std::int64_t> counts,
                                      DType dtype, Stream& stream, const TransferLabel& label) {
  check_counts(counts, "reduce_scatter");
  if (std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == 0) return;
  const ncclDataType_t type = nccl_type(dtype);
  if (all_equal(counts)) {
    run("ncclReduceScatter", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
      return nccl().reduce_scatter(send, receive, as_size(counts.front()), type, ncclSum, comm, on);
    });
    return;
  }
  run("ncclReduce of every rank's chunk", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
    ncclResult_t status = nccl().group_start();
    std::int64_t offset = 0;
    for (int root = 0; root < size_; ++root) {
      const std::int64_t count = counts[static_cast<std::size_t>(root)];
      if (status == ncclSuccess && count > 0) {
        status =
            nccl().reduce(at(send, offset, dtype), receive, as_size(count), type, ncclSum, root, comm, on);
      }
      offset += count;
    }
    const ncclResult_t ended = nccl().group_end();
    return status == ncclSuccess ? ended : status;
  });
}

void NcclCommunicator::all_gather(const void* send, void* receive, std::span<const std::int64_t> counts,
                                  DType dtype, Stream& stream, const TransferLabel& label) {
  check_counts(counts, "all_gather");
  if (std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == 0) return;
  const ncclDataType_t type = nccl_type(dtype);
  if (all_equal(counts)) {
    run("ncclAllGather", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
      return nccl().all_gather(send, receive, as_size(counts.front()), type, comm, on);
    });
    return;
  }
  run("ncclBroadcast of every rank's chunk", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
    ncclResult_t status = nccl().group_start();
    std::int64_t offset = 0;
    for (int root = 0; root < size_; ++root) {
      const std::int64_t count = counts[static_cast<std::size_t>(root)];
      if (status == ncclSuccess && count > 0) {
        status = nccl().broadcast(send, at(receive, offset, dtype), as_size(count), type, root, comm, on);
      }
      offset += count;
    }
    const ncclResult_t ended = nccl().group_end();
    return status == ncclSuccess ? ended : status;
  });
}

void NcclCommunicator::all_to_all(const void* send, std::span<const std::int64_t> send_counts, void* receive,
                                  std::span<const std::int64_t> receive_counts, DType dtype, Stream& stream,
                                  const TransferLabel& label) {
  check_counts(send_counts, "all_to_all (send)");
  check_counts(receive_counts, "all_to_all (receive)");
  const auto is_zero = [](std::int64_t count) { return count == 0; };
  if (std::ranges::all_of(send_counts, is_zero) && std::ranges::all_of(receive_counts, is_zero)) return;
  const ncclDataType_t type = nccl_type(dtype);
  run("ncclSend/ncclRecv of an all-to-all", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
    ncclResult_t status = nccl().group_start();
    std::int64_t send_offset = 0;
    std::int64_t receive_offset = 0;
    for (int peer = 0; peer < size_; ++peer) {
      const std::int64_t sends = send_counts[static_cast<std::size_t>(peer)];
      const std::int64_t receives = receive_counts[static_cast<std::size_t>(peer)];
      if (status == ncclSuccess && sends > 0) {
        status = nccl().send(at(send, send_offset, dtype), as_size(sends), type, peer, comm, on);
      }
      if (status == ncclSuccess && receives > 0) {
        status = nccl().receive(at(receive, receive_offset, dtype), as_size(receives), type, peer, comm, on);
      }
      send_offset += sends;
      receive_offset += receives;
    }
    const ncclResult_t ended = nccl().group_end();
    return status == ncclSuccess ? ended : status;
  });
}

void NcclCommunicator::send(const void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
                            const TransferLabel& label) {
  if (count == 0) return;
  run("ncclSend", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
    return nccl().send(data, as_size(count), nccl_type(dtype), peer, comm, on);
  });
}

void NcclCommunicator::receive(void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
                               const TransferLabel& label) {
  if (count == 0) return;
  run("ncclRecv", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
    return nccl().receive(data, as_size(count), nccl_type(dtype), peer, comm, on);
  });
}

void NcclCommunicator::barrier(Stream& stream, const TransferLabel& label) {
  run("barrier (ncclAllReduce of one element)", stream, label, [&](ncclComm_t comm, cudaStream_t on) {
    return nccl().all_reduce(barrier_word_.data(), barrier_word_.data(), 1, ncclUint32, ncclMax, comm, on);
  });
}

}  // namespace flashoverlap::cuda

namespace flashoverlap {

std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Communicator> control,
                                                     const NcclOptions& options) {
  return std::make_shared<cuda::NcclCommunicator>(std::move(control), options);
}

}  // namespace flashoverlap
