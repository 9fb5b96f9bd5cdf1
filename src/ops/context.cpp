#include <utility>

#include "core/fail.h"
#include "ops/context_state.h"

namespace flashoverlap {

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
void Context::set_tuner(std::shared_ptr<const CallTuner> tuner) {
  state_->tuner = std::move(tuner);
}
const CallTuner* Context::tuner() const {
  return state_->tuner.get();
}
int Context::num_threads() const {
  return state_->num_threads;
}
std::int64_t Context::workspace_bytes() const {
  return state_->executor->workspace_bytes();
}

}  // namespace flashoverlap
