// Collectives on device memory through NCCL.
#pragma once

#include <nccl.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_stream.h"
#include "flashoverlap/communicator.h"
#include "flashoverlap/cuda_context.h"
#include "watchdog.h"

namespace flashoverlap::cuda {

/// One rank's NCCL communicator. Everything that is not a collective on a stream (exchange, rendezvous,
/// agreement on errors) goes through the host communicator that it was made from. Sums are rounded to the
/// element type at every step that NCCL makes, in an order that is NCCL's own.
///
/// A watchdog aborts the communicator when a call is not done within the time-out after it could start; the
/// stream then goes on with undefined data, and its `synchronize` as well as every further call throw.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<Communicator> control, const NcclOptions& options);
  ~NcclCommunicator() override;

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::string_view name() const override { return "nccl"; }
  [[nodiscard]] std::unique_ptr<Stream> make_stream(const std::string& name) override;

  void all_reduce(const void* send, void* receive, std::int64_t count, DType dtype, Stream& stream,
                  const TransferLabel& label) override;
  void reduce_scatter(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                      Stream& stream, const TransferLabel& label) override;
  void all_gather(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                  Stream& stream, const TransferLabel& label) override;
  void all_to_all(const void* send, std::span<const std::int64_t> send_counts, void* receive,
                  std::span<const std::int64_t> receive_counts, DType dtype, Stream& stream,
                  const TransferLabel& label) override;
  void send(const void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
            const TransferLabel& label) override;
  void receive(void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
               const TransferLabel& label) override;
  void barrier(Stream& stream, const TransferLabel& label) override;

  std::vector<std::uint64_t> exchange(std::uint64_t value, const TransferLabel& label) override;
  std::vector<std::string> exchange(const std::string& bytes, const TransferLabel& label) override;
  [[nodiscard]] std::shared_ptr<Communicator> subgroup(std::span<const int> ranks) override;
  void abort(const std::string& reason) noexcept override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  [[nodiscard]] std::chrono::milliseconds timeout() const override;

  /// SMs that one call may take; 0: NCCL's own choice.
  [[nodiscard]] int max_ctas() const { return options_.max_ctas; }
  /// What is registered of what the executor's transfers move.
  [[nodiscard]] NcclBuffers buffers() const { return size_ > 1 ? options_.buffers : NcclBuffers::kPlain; }
  /// Unless `held` has `bytes`, replaces it by registered memory that has, and has as many on every rank. The
  /// communicator keeps the old memory until nobody holds it any more on any rank, and then until the next
  /// call of this that needs new memory: NCCL wants it given back in the same order everywhere, and freeing
  /// it while another rank's kernel waits for this one might hang. Collective, on the host: `bytes` is the
  /// same on all ranks, and so is which call made `held`. An error is thrown on every rank.
  void reserve(std::shared_ptr<const DeviceBuffer>& held, std::int64_t bytes, const std::string& purpose);
  /// Throws the failure, if there is one.
  void throw_if_failed() const;

 private:
  /// Memory that is registered, and what NCCL knows it by.
  struct Registered {
    std::shared_ptr<const DeviceBuffer> memory;
    void* handle = nullptr;  // of ncclCommRegister, or the window
  };

  void check_buffers() const;
  void agree_on_buffers();
  void agree_on_devices();
  void share_board();
  void initialise();
  void warm_up();
  void try_registration();
  void call_every_kind(void* memory, std::int64_t count);
  void release_unused();
  void register_memory(Registered& block);
  void deregister(const Registered& block);
  void abort_comm() noexcept;
  void abort_with_registered() noexcept;
  void close();
  void fail_with(const Failure& failure) noexcept;
  std::optional<Failure> async_error();
  void check(ncclResult_t status, const char* call) const;
  void check_counts(std::span<const std::int64_t> counts, const char* call) const;

  cudaStream_t begin_call(const char* call, Stream& stream, const TransferLabel& label);
  void end_call(ncclResult_t status, const char* call, cudaStream_t stream);
  /// Issues one call, or one group of calls, with the watchdog looking.
  template <class Issue>
  void run(const char* call, Stream& stream, const TransferLabel& label, Issue&& issue) {
    const DeviceScope scope(options_.device);
    const cudaStream_t cuda_stream = begin_call(call, stream, label);
    ncclResult_t status = ncclSuccess;
    {
      const std::scoped_lock lock(mutex_);
      if (!aborted_) status = issue(comm_, cuda_stream);
    }
    end_call(status, call, cuda_stream);
  }

  std::shared_ptr<Communicator> control_;
  NcclOptions options_;
  int rank_;
  int size_;
  std::mutex mutex_;  // held while NCCL is called, so that an abort finds nobody inside unless that call is
                      // what hangs
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> aborted_{false};
  DeviceBuffer barrier_word_;
  std::vector<Registered> registered_;  // in the order of registration, the same on every rank
  std::mutex registered_mutex_;         // against the watchdog, which empties it when it aborts
  std::shared_ptr<FailureBoard> board_;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace flashoverlap::cuda
