#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flashoverlap/timeline.h"

namespace flashoverlap::cpu {

/// The spans of one track, written by one thread. Costs nothing when it is off.
class SpanLog {
 public:
  SpanLog(bool enabled, std::int32_t rank, std::string track)
      : enabled_(enabled), rank_(rank), track_(std::move(track)) {}

  [[nodiscard]] double now_us() const {
    if (!enabled_) return 0;
    using Microseconds = std::chrono::duration<double, std::micro>;
    return Microseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  /// Something called `name` + `index` ran from `begin_us` until now.
  void add(SpanKind kind, const char* name, std::int64_t index, double begin_us) {
    if (enabled_) spans_.push_back({rank_, track_, name + std::to_string(index), kind, begin_us, now_us()});
  }

  void append_to(Timeline& timeline) const {
    timeline.spans.insert(timeline.spans.end(), spans_.begin(), spans_.end());
  }

 private:
  bool enabled_;
  std::int32_t rank_;
  std::string track_;
  std::vector<Span> spans_;
};

}  // namespace flashoverlap::cpu
