#include "cpu/run_error.h"

#include <new>

namespace flashoverlap::cpu {

Error with_place(const std::exception_ptr& error, const std::string& where) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return Error(known.kind(), where + ": " + known.what());
  } catch (const std::bad_alloc&) {
    return Error(ErrorKind::kOutOfMemory, where + ": an allocation failed");
  } catch (const std::exception& other) {
    return Error(ErrorKind::kInternal, where + ": " + other.what());
  } catch (...) {
    return Error(ErrorKind::kInternal, where + ": an exception that is no std::exception");
  }
}

void fail_run(Progress& progress, Communicator& communicator, const std::exception_ptr& error,
              const std::string& where) noexcept {
  try {
    const Error placed = with_place(error, where);
    // First here, so that this rank reports its own error and not the abort that follows from it. Then the
    // others, before this rank's streams unwind: a stream that drops its calls is an error of its own, and
    // would be taken for the cause.
    progress.note(std::make_exception_ptr(placed));
    if (communicator.size() > 1) communicator.abort(placed.what());
    progress.fail(nullptr);
  } catch (...) {  // not even the message could be made
    progress.fail(error);
    if (communicator.size() > 1) communicator.abort("out of memory");
  }
}

}  // namespace flashoverlap::cpu
