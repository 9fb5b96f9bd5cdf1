#include "flashoverlap/launcher.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "core/environment.h"
#include "core/fail.h"

namespace flashoverlap {
namespace {

/// Names of a launcher's variables; null where it has none.
struct Variables {
  const char* launcher;
  const char* rank;
  const char* world_size;
  const char* other_world_size = nullptr;  ///< Read when world_size is not set.
  const char* local_rank = nullptr;
  const char* local_size = nullptr;
  const char* address = nullptr;
  const char* port = nullptr;      ///< Null: `address` has both.
  const char* required = nullptr;  ///< Without it the launcher is not there.
};

constexpr std::array<Variables, 5> kLaunchers{{
    {.launcher = "FLASHOVERLAP_RANK",
     .rank = "FLASHOVERLAP_RANK",
     .world_size = "FLASHOVERLAP_WORLD_SIZE",
     .local_rank = "FLASHOVERLAP_LOCAL_RANK",
     .local_size = "FLASHOVERLAP_LOCAL_SIZE",
     .address = "FLASHOVERLAP_RENDEZVOUS"},
    {.launcher = "OpenMPI",
     .rank = "OMPI_COMM_WORLD_RANK",
     .world_size = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {.launcher = "Hydra",
     .rank = "PMI_RANK",
     .world_size = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .local_size = "MPI_LOCALNRANKS"},
    {.launcher = "torchrun",
     .rank = "RANK",
     .world_size = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .local_size = "LOCAL_WORLD_SIZE",
     .address = "MASTER_ADDR",
     .port = "MASTER_PORT"},
    {.launcher = "SLURM",
     .rank = "SLURM_PROCID",
     .world_size = "SLURM_STEP_NUM_TASKS",
     .other_world_size = "SLURM_NTASKS",
     .local_rank = "SLURM_LOCALID",
     .required = "SLURM_STEP_ID"},
}};

constexpr std::int64_t kMaxRanks = std::numeric_limits<int>::max();

std::string value_of(const char* name) {
  const char* const value = name == nullptr ? nullptr : std::getenv(name);
  return value == nullptr ? "" : value;
}

std::optional<int> integer(const char* name, std::int64_t low, std::int64_t high) {
  if (name == nullptr) return std::nullopt;
  const auto value = core::integer_from_environment(name, low, high);
  return value ? std::optional(static_cast<int>(*value)) : std::nullopt;
}

bool is_there(const Variables& names) {
  if (names.required != nullptr && value_of(names.required).empty()) return false;
  return !value_of(names.rank).empty() || !value_of(names.world_size).empty();
}

int needed(const char* name, std::optional<int> value, const char* other) {
  if (value) return *value;
  core::fail(ErrorKind::kBadArgument, "the environment has {}={}, but {} is not set; both are needed", other,
             value_of(other), name);
}

void check_below(const char* name, int value, const char* limit_name, int limit) {
  if (value < limit) return;
  core::fail(ErrorKind::kBadArgument,
             "the environment contradicts itself: {}={}, but {}={}; less is expected", name, value,
             limit_name, limit);
}

std::string rendezvous_of(const Variables& names) {
  std::string address = value_of(names.address);
  if (address.empty()) return address;
  constexpr int kMaxPort = 65535;
  if (names.port != nullptr) {
    const auto port = integer(names.port, 1, kMaxPort);
    return address + ":" + std::to_string(needed(names.port, port, names.address));
  }
  const std::size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool is_number =
      !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
  if (colon == 0 || !is_number || std::stoi(port) < 1 || std::stoi(port) > kMaxPort) {
    core::fail(ErrorKind::kBadArgument,
               "environment variable {} is '{}'; accepted: host:port with a port from 1 to {}", names.address,
               address, kMaxPort);
  }
  return address;
}

Launch read(const Variables& names) {
  Launch launch;
  launch.launcher = names.launcher;
  const char* size_name = names.world_size;
  auto size = integer(size_name, 1, kMaxRanks);
  if (!size && names.other_world_size != nullptr) {
    size_name = names.other_world_size;
    size = integer(size_name, 1, kMaxRanks);
  }
  const auto rank = integer(names.rank, 0, kMaxRanks - 1);
  launch.world_size = needed(size_name, size, names.rank);
  launch.rank = needed(names.rank, rank, size_name);
  check_below(names.rank, launch.rank, size_name, launch.world_size);

  if (const auto local_size = integer(names.local_size, 1, kMaxRanks)) {
    launch.local_size = *local_size;
    check_below(names.local_size, launch.local_size - 1, size_name, launch.world_size);
  }
  const auto local_rank = integer(names.local_rank, 0, kMaxRanks - 1);
  const bool one_host = launch.world_size == 1 || launch.local_size == launch.world_size;
  if (!local_rank && !one_host) {
    // A rank of the whole job taken for one of this host is an error that shows on the second host only.
    core::fail(ErrorKind::kBadArgument,
               "the environment has {}={} of {}, but {} is not set; it is needed when ranks may "
               "be on several hosts",
               names.rank, launch.rank, launch.world_size, names.local_rank);
  }
  launch.local_rank = local_rank.value_or(launch.rank);
  check_below(names.local_rank, launch.local_rank, size_name, launch.world_size);
  if (launch.local_size > 0)
    check_below(names.local_rank, launch.local_rank, names.local_size, launch.local_size);
  launch.rendezvous = rendezvous_of(names);
  return launch;
}

}  // namespace

std::optional<Launch> detect_launch() {
  for (const Variables& names : kLaunchers) {
    if (is_there(names)) return read(names);
  }
  return std::nullopt;
}

}  // namespace flashoverlap
