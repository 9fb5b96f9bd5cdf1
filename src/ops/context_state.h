#pragma once

#include <memory>

#include "flashoverlap/operators.h"

namespace flashoverlap {

struct Context::State {
  std::shared_ptr<Communicator> communicator;
  int num_threads = 0;
  std::unique_ptr<Executor> executor;
  std::shared_ptr<const CallTuner> tuner;
};

}  // namespace flashoverlap
