#pragma once

#include <memory>
#include <vector>

#include "comm/world.h"
#include "flashoverlap/in_process.h"

namespace flashoverlap::comm {

struct InProcessWorld {
  std::shared_ptr<World> world;
  std::vector<std::shared_ptr<Communicator>> communicators;  ///< By rank.
};

/// As make_in_process_communicators, with the world that they share.
InProcessWorld make_in_process_world(int world_size, const InProcessOptions& options);

}  // namespace flashoverlap::comm
