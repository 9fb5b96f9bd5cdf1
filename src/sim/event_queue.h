#pragma once

#include <cstdint>
#include <queue>
#include <vector>

namespace flashoverlap::sim {

enum class EventKind {
  kCompute,    ///< Something happens to `rank`'s units; `version` must be current.
  kTriggered,  ///< Transfer `index` of `rank` may start.
  kFlowEnd,    ///< Flow `index` ends; `version` must be current.
};

struct Event {
  double time_us = 0;
  std::uint64_t order =
      0;  ///< Of insertion: events at the same time happen in this order, so that runs are repeatable.
  EventKind kind = EventKind::kCompute;
  std::int64_t rank = 0;
  std::int64_t index = 0;
  std::uint32_t version = 0;
};

class EventQueue {
 public:
  void push(Event event) {
    event.order = next_order_++;
    queue_.push(event);
  }
  [[nodiscard]] bool empty() const { return queue_.empty(); }
  Event pop() {
    Event event = queue_.top();
    queue_.pop();
    ++num_popped_;
    return event;
  }
  [[nodiscard]] std::int64_t num_popped() const { return num_popped_; }

 private:
  struct Later {
    bool operator()(const Event& a, const Event& b) const {
      return a.time_us != b.time_us ? a.time_us > b.time_us : a.order > b.order;
    }
  };
  std::priority_queue<Event, std::vector<Event>, Later> queue_;
  std::uint64_t next_order_ = 0;
  std::int64_t num_popped_ = 0;
};

}  // namespace flashoverlap::sim
