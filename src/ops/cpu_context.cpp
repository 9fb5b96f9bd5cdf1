// Apart from the other constructor, so that a program that computes on GPUs only needs no BLAS on the CPU.
#include <algorithm>
#include <thread>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/cpu_executor.h"
#include "ops/context_state.h"

namespace flashoverlap {

Context::Context(std::shared_ptr<Communicator> communicator, const ContextOptions& options)
    : state_(std::make_unique<State>()) {
  if (communicator == nullptr) core::fail(ErrorKind::kBadArgument, "communicator is null");
  if (options.num_threads < 0) {
    core::fail(ErrorKind::kBadArgument, "num_threads is {}; it must be at least 1, or 0: cores / ranks",
               options.num_threads);
  }
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  state_->num_threads =
      options.num_threads > 0 ? options.num_threads : std::max(1, cores / communicator->size());
  state_->communicator = std::move(communicator);
  state_->executor =
      make_cpu_executor(state_->communicator, {.num_threads = state_->num_threads,
                                               .workspace_limit_bytes = options.workspace_limit_bytes,
                                               .poison_workspace = options.poison_workspace,
                                               .hooks = options.hooks});
}

}  // namespace flashoverlap
