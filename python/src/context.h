#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/operators.h"

namespace flashoverlap::python {

namespace nb = nanobind;

/// A context and the rule that only one thread at a time may use it.
struct GuardedContext {
  GuardedContext(std::unique_ptr<Context> owned_, int device_)
      : owned(std::move(owned_)), context(*owned), device(device_) {}
  GuardedContext(const GuardedContext&) = delete;
  GuardedContext& operator=(const GuardedContext&) = delete;
  // Waits for threads, which may want the interpreter's lock themselves (process groups).
  ~GuardedContext() {
    if (PyGILState_Check() != 0) {
      const nb::gil_scoped_release release;
      owned.reset();
    }
  }

  /// Does not wait: calls of two threads of one rank would have no order that the other ranks know.
  [[nodiscard]] std::unique_lock<std::mutex> enter() {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock) {
      core::fail(
          ErrorKind::kBadArgument,
          "rank {}: another thread is in a call of this communicator; calls of one rank need one order, "
          "so use one thread, or a subgroup for each",
          context.communicator().rank());
    }
    return lock;
  }

  std::unique_ptr<Context> owned;
  Context& context;
  int device;  ///< Where its operands are: a CUDA device, or -1: host memory.
  std::mutex mutex;
};

}  // namespace flashoverlap::python
