#pragma once

#include <optional>
#include <string>

namespace flashoverlap {

/// This process's place among the processes that a launcher started together.
struct Launch {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  ///< Among the processes on this host.
  /// Processes on this host; 0: the launcher does not say.
  int local_size = 0;
  /// "host:port" where the processes can meet; empty: the launcher does not say.
  std::string rendezvous;
  /// "FLASHOVERLAP_RANK", "OpenMPI", "Hydra", "torchrun" or "SLURM".
  std::string launcher;
};

/// Reads the launcher's environment; no value when no launcher started this process. The first that is there
/// counts:
///
///   1. explicit   FLASHOVERLAP_RANK, FLASHOVERLAP_WORLD_SIZE; FLASHOVERLAP_LOCAL_RANK,
///   FLASHOVERLAP_LOCAL_SIZE,
///                 FLASHOVERLAP_RENDEZVOUS
///   2. OpenMPI    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; OMPI_COMM_WORLD_LOCAL_RANK,
///   OMPI_COMM_WORLD_LOCAL_SIZE
///   3. Hydra      PMI_RANK, PMI_SIZE; MPI_LOCALRANKID, MPI_LOCALNRANKS (MPICH, Intel MPI, MVAPICH)
///   4. torchrun   RANK, WORLD_SIZE; LOCAL_RANK, LOCAL_WORLD_SIZE; MASTER_ADDR, MASTER_PORT
///   5. SLURM      SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS; SLURM_LOCALID. Only in a job step that
///   has a
///                 SLURM_STEP_ID: a batch script has SLURM_PROCID=0 too, but is no rank.
///
/// Nested launchers (mpirun inside a SLURM step) are usual, so that the later ones are not looked at. A
/// launcher is there when its rank or world size is set to something. The local rank is the rank when a
/// launcher does not tell it and all processes are on one host; otherwise it must be there.
///
/// Throws Error(kBadArgument) that names variable and value: when one of rank and world size is missing, when
/// a number is not one, when rank >= world size, local rank >= local size, or local size > world size, or a
/// port is not one.
[[nodiscard]] std::optional<Launch> detect_launch();

}  // namespace flashoverlap
