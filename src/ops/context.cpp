#include <algorithm>
#include <thread>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/cpu_executor.h"
#include "flashoverlap/operators.h"

namespace flashoverlap {

struct Context::State {
  std::shared_ptr<Communicator> communicator;
  int num_threads = 0;
  std::unique_ptr<Executor> executor;
};

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

Context::Context(std::shared_ptr<Communicator> communicator, std::unique_ptr<Executor> executor)
    : state_(std::make_unique<State>()) {
  if (communicator == nullptr) core::fail(ErrorKind::kBadArgument, "communicator is null");
  if (executor == nullptr) core::fail(ErrorKind::kBadArgument, "executor is null");
  state_->communicator = std::move(communicator);
  state_->executor = std::move(executor);
}

Context::~Context() = default;

Communicator& Context::communicator() const {
  return *state_->communicator;
}
Executor& Context::executor() const {
  return *state_->executor;
}
int Context::num_threads() const {
  return state_->num_threads;
}
std::int64_t Context::workspace_bytes() const {
  return state_->executor->workspace_bytes();
}

}  // namespace flashoverlap
