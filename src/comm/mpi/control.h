#pragma once

#include <mpi.h>

#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <string>

#include "flashoverlap/error.h"

namespace flashoverlap::comm::mpi {

/// Small messages about the calls rather than of them. While all goes well only kHello and kFinished are
/// sent.
enum class ControlKind : std::int32_t {
  kHello,     ///< Once, so that connections exist before they are needed. text: process and host.
  kFailure,   ///< The world has failed: text says why.
  kQuestion,  ///< Where are you? Asked by a rank whose time-out is over.
  kAnswer,    ///< text says where.
  kFinished,  ///< This rank makes no more calls. number: 1 when it cannot take part in MPI_Finalize, else 0.
};

struct ControlMessage {
  ControlKind kind = ControlKind::kHello;
  ErrorKind error_kind = ErrorKind::kCommunication;  ///< kFailure.
  std::int64_t number = 0;                           ///< Of the question, or see kFinished.
  std::string text = {};                             ///< Cut to kMaxControlText.
};

/// Small enough to travel at once in any MPI, so that neither side ever waits.
inline constexpr std::size_t kMaxControlText = 3000;

/// Control messages over a communicator of their own. Any thread may send; one at a time may receive.
class ControlChannel {
 public:
  explicit ControlChannel(MPI_Comm communicator) : communicator_(communicator) {}

  /// A message to a rank that cannot be reached is lost, as one to a rank that has died since would be: who
  /// waits for its answer has a time-out.
  void send(int rank, const ControlMessage& message);
  struct Received {
    int rank;
    ControlMessage message;
  };
  /// The next message that has come, if any.
  std::optional<Received> receive();
  /// True when all messages have left. Those to a dead rank may never.
  bool all_sent();

 private:
  struct Sent {
    std::string bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  MPI_Comm communicator_;
  std::mutex mutex_;
  std::list<Sent> outbox_;
};

}  // namespace flashoverlap::comm::mpi
