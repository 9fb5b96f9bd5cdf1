#pragma once

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace flashoverlap::comm::mpi {

/// Non-blocking messages of one communicator in flight, each with what to do once it is complete. For one
/// thread.
class Requests {
 public:
  /// Given the bytes of the message.
  using Then = std::function<void(int bytes)>;

  explicit Requests(MPI_Comm communicator) : communicator_(communicator) {}
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  void send(const void* data, std::int64_t bytes, int peer, int tag, Then then);
  void receive(void* data, std::int64_t bytes, int peer, int tag, Then then);

  /// Lets MPI work and runs what complete messages set off. True when any was complete. A message that failed
  /// sets off nothing; see `error`.
  bool advance();
  [[nodiscard]] bool empty() const { return requests_.empty(); }
  /// The first message that failed, for example because it was longer than expected; empty: none.
  [[nodiscard]] const std::string& error() const { return error_; }

  /// After a failure: withdraws receives that nothing has come for, and gives the other messages until
  /// `deadline`, so that as few as possible still touch the caller's buffers later.
  void withdraw(std::chrono::steady_clock::time_point deadline) noexcept;

 private:
  bool advance_once();
  struct Message {
    bool is_receive;
    int peer;
    Then then;
  };
  void add(int code, MPI_Request request, Message message);
  void note_error(const Message& message, int code);

  MPI_Comm communicator_;
  std::vector<MPI_Request> requests_;
  std::vector<Message> messages_;  // Of the same index.
  std::vector<int> indices_;       // Kept to allocate once.
  std::vector<MPI_Status> statuses_;
  std::string error_;
};

}  // namespace flashoverlap::comm::mpi
