#include "comm/mpi/runtime.h"

#include <signal.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/mpi/mpi_error.h"
#include "comm/mpi/service.h"
#include "core/fail.h"

namespace flashoverlap::comm::mpi {
namespace {

std::mutex g_mutex;
bool g_is_prepared = false;
std::chrono::milliseconds g_patience{60'000};

// MPI_Finalize calls this first, because it is attached to MPI_COMM_SELF (MPI 3.1, section 8.7.1).
int before_finalize(MPI_Comm /*self*/, int /*keyval*/, void* /*value*/, void* /*state*/) {
  if (Service::instance().stop(g_patience)) return MPI_SUCCESS;
  std::fflush(nullptr);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  return MPI_SUCCESS;
}

void finalize_at_exit() {
  int is_finalized = 0;
  if (MPI_Finalized(&is_finalized) == MPI_SUCCESS && is_finalized == 0) MPI_Finalize();
}

// OpenMPI 4.1 writes to the socket of a dead rank without MSG_NOSIGNAL (seen with its TCP transport): the
// signal would end this process before it can say what happened.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
}

std::string name_of_level(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return fmt::format("thread level {}", level);
  }
}

void initialize() {
  int level = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  std::atexit(finalize_at_exit);
  if (level < MPI_THREAD_MULTIPLE) {
    core::fail(
        ErrorKind::kUnsupported,
        "this MPI library offers {} only; MPI_THREAD_MULTIPLE is needed: use an MPI that was built with it",
        name_of_level(level));
  }
}

}  // namespace

void require_mpi(std::chrono::milliseconds patience) {
  const std::lock_guard lock(g_mutex);
  int is_finalized = 0;
  check(MPI_Finalized(&is_finalized), "MPI_Finalized");
  if (is_finalized != 0) {
    core::fail(ErrorKind::kBadArgument,
               "MPI is finalised already, and cannot be initialised twice: make the communicator before "
               "MPI_Finalize");
  }
  int is_initialized = 0;
  check(MPI_Initialized(&is_initialized), "MPI_Initialized");
  if (is_initialized == 0) initialize();
  int level = MPI_THREAD_SINGLE;
  check(MPI_Query_thread(&level), "MPI_Query_thread");
  if (level < MPI_THREAD_MULTIPLE) {
    core::fail(ErrorKind::kUnsupported,
               "MPI was initialised with {}; MPI_THREAD_MULTIPLE is needed: call MPI_Init_thread(…, "
               "MPI_THREAD_MULTIPLE, …), or leave the initialisation to this library",
               name_of_level(level));
  }
  ignore_broken_pipes();
  g_patience = patience;
  if (std::exchange(g_is_prepared, true)) return;
  int keyval = MPI_KEYVAL_INVALID;
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_finalize, &keyval, nullptr),
        "MPI_Comm_create_keyval");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, keyval, nullptr), "MPI_Comm_set_attr");
}

void call_with_timeout(std::chrono::milliseconds timeout, const std::string& what,
                       std::function<void()> function) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;
    std::exception_ptr error;
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, function = std::move(function)] {
    std::exception_ptr error;
    try {
      function();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(shared->mutex);
    shared->error = error;
    shared->is_done = true;
    shared->changed.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  if (!shared->changed.wait_for(lock, timeout, [&] { return shared->is_done; })) {
    Service::instance().note_lost_rank();
    core::fail(ErrorKind::kTimeout,
               "time-out after {} ms in {}: not all ranks have come, or one is dead, "
               "stopped or cut off",
               timeout.count(), what);
  }
  if (shared->error) std::rethrow_exception(shared->error);
}

}  // namespace flashoverlap::comm::mpi
