#pragma once

#include <functional>
#include <memory>
#include <string>

#include "flashoverlap/communicator.h"

namespace flashoverlap {

/// A stream on a thread of its own: tasks run one after the other in the order in which they were put in.
/// After a task throws, the tasks behind it are dropped, and `synchronize` throws that error once; then the
/// stream can be used again. Waiting, on both sides, is on condition variables: an idle stream costs no
/// processor time.
class HostStream final : public Stream {
 public:
  /// `name` shows in traces and debuggers (Linux keeps 15 characters). `on_unwind`, where given, is called
  /// when an exception destroys the stream, before the destructor waits: it should make a task that waits for
  /// others give up, and must not throw.
  explicit HostStream(std::string name, std::function<void()> on_unwind = {});
  /// Waits for the task in flight, drops the rest.
  ~HostStream() override;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  /// Puts `task` at the end and returns. Dropped when an error waits for `synchronize`. What the task
  /// captures is destroyed before a `synchronize` that waits for it returns. Throws Error(kBadArgument) for
  /// an empty function.
  void enqueue(std::function<void()> task);
  /// Throws Error(kBadArgument) when called from a task of this stream, which would wait for itself.
  void synchronize() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flashoverlap
