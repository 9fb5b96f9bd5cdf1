#include "event_log.h"

#include <algorithm>
#include <chrono>

#include "check.h"

namespace flashoverlap::cuda {

void EventLog::begin(cudaStream_t stream, std::string track, std::string name, SpanKind kind) {
  if (!is_on()) return;
  Entry entry{.stream = stream,
              .begin = Event(true),
              .end = Event(true),
              .span = {.rank = rank_, .track = std::move(track), .name = std::move(name), .kind = kind}};
  entry.begin.record(stream);
  entries_.push_back(std::move(entry));
}

void EventLog::end(cudaStream_t stream) {
  if (!is_on()) return;
  const auto last = std::find_if(entries_.rbegin(), entries_.rend(),
                                 [&](const Entry& entry) { return entry.stream == stream; });
  if (last == entries_.rend()) return;
  last->end.record(stream);
  last->is_ended = true;
}

void EventLog::finish(cudaStream_t stream) {
  if (!is_on() || entries_.empty()) return;
  const Event now(true);
  now.record(stream);
  while (!now.has_come()) {
  }
  const double now_us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
  const auto host_us = [&](const Event& event) {
    float before_ms = 0;
    FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&before_ms, event.get(), now.get()));
    return now_us - static_cast<double>(before_ms) * 1e3;
  };
  for (Entry& entry : entries_) {
    if (!entry.is_ended) continue;
    entry.span.begin_us = host_us(entry.begin);
    entry.span.end_us = host_us(entry.end);
    timeline_->spans.push_back(entry.span);
  }
  entries_.clear();
}

}  // namespace flashoverlap::cuda
