#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/communicator.h"

namespace flashoverlap::ops {

/// What a rank shows to the others before they go on together.
struct Ticket {
  std::uint64_t agreement = 0;  ///< Must be equal on all ranks.
  std::string description;      ///< One line; what this rank has, for the message when they differ.
  std::string payload;          ///< Any bytes for the others.
};

/// The operator with its shape, as every error of it has them.
std::string with_shape(std::string_view operation, std::int64_t m, std::int64_t n, std::int64_t k);

/// Runs `work` on each rank and exchanges how it went. When all ranks agree, returns everybody's payload, by
/// rank. When `work` threw on a rank, every rank throws that rank's error with the rank in front; when
/// tickets differ, every rank throws Error(kBadArgument) that shows two that do. So constructors fail on all
/// ranks or on none. `operation` has the shape; an abort or time-out in here names it too.
std::vector<std::string> agree(Communicator& communicator, const std::string& operation,
                               const std::function<Ticket()>& work);

}  // namespace flashoverlap::ops
