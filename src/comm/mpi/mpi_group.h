#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/mpi/mpi_world.h"

namespace flashoverlap::comm::mpi {

/// Which message of which call: tags keep apart the calls that several streams make at the same time, in
/// whatever order. MPI's own collectives cannot do that: they must start in the same order on all ranks.
enum class MessageKind { kHeader, kData, kSum, kPayload, kPairHeader, kPairData, kSubgroup };

/// The ranks of one communicator in the order of their ranks there, with an MPI communicator of their own.
class MpiGroup {
 public:
  /// Takes `communicator` over. `members`: world ranks.
  MpiGroup(std::shared_ptr<MpiWorld> world, MPI_Comm communicator, std::vector<int> members, int rank);
  /// Frees the communicator, but for one of a failed world: a message may still be on its way.
  ~MpiGroup();
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  [[nodiscard]] MpiWorld& world() const { return *world_; }
  [[nodiscard]] const std::shared_ptr<MpiWorld>& shared_world() const { return world_; }
  [[nodiscard]] MPI_Comm communicator() const { return communicator_; }
  [[nodiscard]] const std::vector<int>& members() const { return members_; }
  [[nodiscard]] int size() const { return static_cast<int>(members_.size()); }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }

  /// Numbers of this rank's next call, which the other participants' matching call has too.
  std::uint64_t next_collective();
  std::uint64_t next_send(int to);
  std::uint64_t next_receive(int from);
  std::uint64_t next_subgroup(const std::vector<int>& sorted);

  /// Numbers wrap around where MPI's tags end. The calls that share a tag then are thousands of calls apart.
  [[nodiscard]] int tag(std::uint64_t number, MessageKind kind) const;

 private:
  std::shared_ptr<MpiWorld> world_;
  MPI_Comm communicator_;
  std::vector<int> members_;
  int rank_;
  std::uint64_t num_numbers_ = 1;  // That tags can tell apart.

  std::mutex mutex_;
  std::uint64_t collectives_ = 0;
  std::vector<std::uint64_t> sends_;
  std::vector<std::uint64_t> receives_;
  std::map<std::vector<int>, std::uint64_t> subgroups_;
};

}  // namespace flashoverlap::comm::mpi
