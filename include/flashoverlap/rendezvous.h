#pragma once

#include <chrono>
#include <memory>

#include "flashoverlap/communicator.h"
#include "flashoverlap/launcher.h"

namespace flashoverlap {

struct RendezvousOptions {
  std::chrono::milliseconds timeout{60'000};  ///< To find each other, and then of every exchange.
};

/// The control channel of processes that were started without MPI (torchrun, SLURM): `exchange`, `subgroup`
/// and `abort` over TCP, for make_nccl_communicator (cuda_context.h) to build on. Everything on a stream
/// throws Error(kUnsupported).
///
/// Rank 0 listens at the port of launch.rendezvous ("host:port"; with torchrun MASTER_ADDR:MASTER_PORT, or
/// FLASHOVERLAP_RENDEZVOUS with any launcher), on a thread of its own; the others connect to it and try again
/// until the time-out. torchrun's own store may occupy MASTER_PORT: then set FLASHOVERLAP_RENDEZVOUS to
/// another one. Collective. There is no encryption and no authentication beyond a check of version and world
/// size: use it on networks that are trusted, as NCCL's own rendezvous is.
///
/// Error(kBadArgument) when the launcher says no place to meet or the address cannot be resolved;
/// Error(kTimeout) naming the ranks that did not come; Error(kCommunication) when a rank's connection ends or
/// it was started with another world size.
[[nodiscard]] std::shared_ptr<Communicator> make_rendezvous_communicator(
    const Launch& launch, const RendezvousOptions& options = {});

}  // namespace flashoverlap
