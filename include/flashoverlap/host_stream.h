#pragma once

#include <functional>
#include <memory>
#include <string>

#include "flashoverlap/communicator.h"

namespace flashoverlap {

/// A stream on a thread of its own: tasks run one after the other in the order in which they were put in. After a task
/// throws, the tasks behind it are dropped, and `synchronize` throws that error once; then the stream can be used again.
class HostStream final : public Stream {
 public:
  /// `name` shows in traces and debuggers.
  explicit HostStream(std::string name);
  /// Waits for the task in flight, drops the rest.
  ~HostStream() override;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  void enqueue(std::function<void()> task);
  void synchronize() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flashoverlap
