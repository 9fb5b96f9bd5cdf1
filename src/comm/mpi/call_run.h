#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi/movement.h"
#include "comm/mpi/mpi_group.h"
#include "comm/mpi/requests.h"
#include "comm/mpi/wire.h"

namespace flashoverlap::comm::mpi {

/// A call between being issued and being done.
struct Issued {
  std::shared_ptr<const Call> call;
  std::uint64_t number = 0;
  std::vector<int> peers;  ///< The other participants, as group ranks.
};

/// Makes one call, on the thread that runs it: sends this rank's call and data to its peers, takes theirs,
/// and compares. Nobody waits for a comparison before data moves: a wrong message cannot reach beyond the
/// caller's buffers, and the call fails on all ranks in the end.
class CallRun {
 public:
  /// Returns the payloads of all ranks, in group order (exchanges; else empty).
  static std::vector<std::string> make(MpiGroup& group, const Issued& issued,
                                       std::chrono::milliseconds timeout);

 private:
  using Clock = std::chrono::steady_clock;

  struct Peer {
    int rank = 0;
    bool needs_header = false;
    std::string header_bytes;
    std::optional<Header> header;
    std::string payload;
    std::unique_ptr<Flow> payload_in;
    std::unique_ptr<Flow> payload_out;
  };

  CallRun(MpiGroup& group, const Issued& issued);

  void start();
  void wait(std::chrono::milliseconds timeout);
  void take_header(Peer& peer, int bytes);
  void receive_payload(Peer& peer);
  void compare_with(const Peer& peer);
  void compare_all();
  [[nodiscard]] bool all_headers_are_here() const;
  void show_progress();
  void check_finished_ranks();
  [[nodiscard]] bool needs_more_from(const Pending::Peer& peer) const;
  [[noreturn]] void time_out(Clock::time_point begin);
  [[nodiscard]] std::string what_is_missing();
  [[nodiscard]] std::vector<std::string> payloads();

  [[nodiscard]] bool is_pair() const;

  MpiGroup& group_;
  const Issued issued_;
  const Call& call_;
  Requests requests_;
  std::string own_header_;
  std::deque<Peer> peers_;
  std::unique_ptr<Movement> movement_;
  std::shared_ptr<Pending> pending_;
};

}  // namespace flashoverlap::comm::mpi
