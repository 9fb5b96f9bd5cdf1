// When the parts of a call ran on the device, as spans of the host's clock.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "device.h"
#include "flashoverlap/timeline.h"

namespace flashoverlap::cuda {

/// Notes events around parts of a call and turns them into spans once the call is done. Does nothing when
/// made without a timeline.
class EventLog {
 public:
  EventLog(Timeline* timeline, std::int32_t rank) : timeline_(timeline), rank_(rank) {}

  void begin(cudaStream_t stream, std::string track, std::string name, SpanKind kind);
  /// Of the span that was begun last on this stream.
  void end(cudaStream_t stream);
  /// Appends the spans. `stream` must have passed everything; the last event in it ties the device's clock to
  /// the host's.
  void finish(cudaStream_t stream);
  [[nodiscard]] bool is_on() const { return timeline_ != nullptr; }

 private:
  struct Entry {
    cudaStream_t stream;
    Event begin;
    Event end;
    bool is_ended = false;
    Span span;
  };
  Timeline* timeline_;
  std::int32_t rank_;
  std::vector<Entry> entries_;
};

}  // namespace flashoverlap::cuda
