#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/call.h"
#include "flashoverlap/communicator.h"

namespace flashoverlap::comm {

/// A call that has its number and waits in a stream for its turn.
class QueuedCall {
 public:
  QueuedCall() = default;
  /// Without `make` before it: the stream dropped the call, and whoever waits for it must be told.
  virtual ~QueuedCall() = default;
  QueuedCall(const QueuedCall&) = delete;
  QueuedCall& operator=(const QueuedCall&) = delete;

  /// Returns when the call is complete on this rank, or throws.
  virtual void make() = 0;
};

/// What the communicators whose streams are HostStreams have in common: checks of arguments, time-outs, and
/// the order of calls. A provider numbers the calls and makes them.
class HostCommunicator : public Communicator {
 public:
  [[nodiscard]] int rank() const final { return rank_; }
  [[nodiscard]] int size() const final { return static_cast<int>(members_.size()); }
  [[nodiscard]] std::unique_ptr<Stream> make_stream(const std::string& name) final;

  void all_reduce(const void* send, void* receive, std::int64_t count, DType dtype, Stream& stream,
                  const TransferLabel& label) final;
  void reduce_scatter(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                      Stream& stream, const TransferLabel& label) final;
  void all_gather(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                  Stream& stream, const TransferLabel& label) final;
  void all_to_all(const void* send, std::span<const std::int64_t> send_counts, void* receive,
                  std::span<const std::int64_t> receive_counts, DType dtype, Stream& stream,
                  const TransferLabel& label) final;
  void send(const void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
            const TransferLabel& label) final;
  void receive(void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
               const TransferLabel& label) final;
  void barrier(Stream& stream, const TransferLabel& label) final;
  std::vector<std::uint64_t> exchange(std::uint64_t value, const TransferLabel& label) final;
  std::vector<std::string> exchange(const std::string& bytes, const TransferLabel& label) final;
  [[nodiscard]] std::shared_ptr<Communicator> subgroup(std::span<const int> ranks) final;

  void set_timeout(std::chrono::milliseconds timeout) final;
  [[nodiscard]] std::chrono::milliseconds timeout() const final {
    return std::chrono::milliseconds{timeout_ms_.load()};
  }

 protected:
  /// `members`: world ranks of the group in the order of their ranks in it; `is_whole`: it is the world.
  HostCommunicator(std::vector<int> members, int rank, bool is_whole, std::chrono::milliseconds timeout);

  /// Takes a number for the call. `ranks`: of a send or receive (source, destination), as group ranks; empty
  /// for collectives. May throw the world's failure.
  [[nodiscard]] virtual std::shared_ptr<QueuedCall> queue(Call call, const std::vector<int>& ranks) = 0;
  /// Makes an exchange now, on this thread: the ranks' payloads.
  [[nodiscard]] virtual std::vector<std::string> exchange_now(Call call) = 0;
  /// `sorted`: the listed group ranks in ascending order; call.send_counts has them as listed.
  [[nodiscard]] virtual std::shared_ptr<Communicator> subgroup_now(Call call,
                                                                   const std::vector<int>& sorted) = 0;

  /// Aborts the world in this rank's name; outlives this object.
  [[nodiscard]] virtual std::function<void(const std::string& reason)> aborter() const = 0;

  [[nodiscard]] const std::vector<int>& members() const { return members_; }
  [[nodiscard]] int world_rank() const { return members_[static_cast<std::size_t>(rank_)]; }

 private:
  void put(Call call, Stream& stream, const TransferLabel& label, const std::vector<int>& ranks = {});
  void check_peer(std::string_view what, int peer) const;
  [[nodiscard]] std::vector<int> checked_subgroup(std::span<const int> ranks) const;

  const std::vector<int> members_;
  const int rank_;
  std::atomic<std::int64_t> timeout_ms_;
  std::string group_text_;  // As in Call::group.
};

/// Throws Error(kBadArgument) below 1 ms; cuts what would overflow.
std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout);

/// The same, but FLASHOVERLAP_TIMEOUT_MS replaces a `timeout` that is `standard`, the provider's default.
std::chrono::milliseconds timeout_or_environment(std::chrono::milliseconds timeout,
                                                 std::chrono::milliseconds standard);

}  // namespace flashoverlap::comm
