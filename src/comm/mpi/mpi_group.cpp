#include "comm/mpi/mpi_group.h"

#include <utility>

#include "comm/mpi/mpi_error.h"

namespace flashoverlap::comm::mpi {
namespace {

constexpr std::uint64_t kTagsPerCall = 8;

}  // namespace

MpiGroup::MpiGroup(std::shared_ptr<MpiWorld> world, MPI_Comm communicator, std::vector<int> members, int rank)
    : world_(std::move(world)),
      communicator_(communicator),
      members_(std::move(members)),
      rank_(rank),
      sends_(members_.size(), 0),
      receives_(members_.size(), 0) {
  // Errors are thrown, not MPI's default: the end of the job.
  check(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  void* value = nullptr;
  int is_set = 0;
  check(MPI_Comm_get_attr(communicator_, MPI_TAG_UB, static_cast<void*>(&value), &is_set),
        "MPI_Comm_get_attr");
  constexpr int kLeastUpperBound = 32767;  // MPI 3.1, section 8.1.2
  const int upper_bound = is_set != 0 ? *static_cast<int*>(value) : kLeastUpperBound;
  num_numbers_ = (static_cast<std::uint64_t>(upper_bound) + 1) / kTagsPerCall;
}

MpiGroup::~MpiGroup() {
  int is_finalized = 0;
  if (MPI_Finalized(&is_finalized) != MPI_SUCCESS || is_finalized != 0) return;
  if (!world_->failed()) MPI_Comm_free(&communicator_);
}

std::uint64_t MpiGroup::next_collective() {
  const std::lock_guard lock(mutex_);
  return collectives_++;
}

std::uint64_t MpiGroup::next_send(int to) {
  const std::lock_guard lock(mutex_);
  return sends_[static_cast<std::size_t>(to)]++;
}

std::uint64_t MpiGroup::next_receive(int from) {
  const std::lock_guard lock(mutex_);
  return receives_[static_cast<std::size_t>(from)]++;
}

std::uint64_t MpiGroup::next_subgroup(const std::vector<int>& sorted) {
  const std::lock_guard lock(mutex_);
  // Other lists are other calls; mixing them in keeps their tags apart.
  constexpr std::uint64_t kPrime = 1099511628211U;  // FNV-1a
  std::uint64_t hash = 14695981039346656037U;
  for (const int rank : sorted) hash = (hash ^ static_cast<std::uint64_t>(rank)) * kPrime;
  return hash + subgroups_[sorted]++;
}

int MpiGroup::tag(std::uint64_t number, MessageKind kind) const {
  return static_cast<int>(number % num_numbers_ * kTagsPerCall + static_cast<std::uint64_t>(kind));
}

}  // namespace flashoverlap::comm::mpi
