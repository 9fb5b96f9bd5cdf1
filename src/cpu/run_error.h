#pragma once

#include <exception>
#include <string>

#include "cpu/progress.h"
#include "flashoverlap/communicator.h"
#include "flashoverlap/error.h"

namespace flashoverlap::cpu {

/// `error` as an Error whose message begins with `where`. Errors keep their kind, a failed allocation is
/// kOutOfMemory, anything else kInternal.
Error with_place(const std::exception_ptr& error, const std::string& where);

/// Ends the run here and on every other rank with this error.
void fail_run(Progress& progress, Communicator& communicator, const std::exception_ptr& error,
              const std::string& where) noexcept;

}  // namespace flashoverlap::cpu
