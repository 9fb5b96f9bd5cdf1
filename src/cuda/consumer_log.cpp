#include "consumer_log.h"

#include "check.h"

namespace flashoverlap::cuda {

ConsumerLog::ConsumerLog(int device) : device_(device) {
  const DeviceScope scope(device_);
  void* memory = nullptr;
  FLASHOVERLAP_CUDA_CHECK(cudaHostAlloc(&memory, kKept * sizeof(ConsumerTimes), cudaHostAllocMapped));
  times_ = new (memory) ConsumerTimes[kKept]{};
  for (Event& event : ended_) event = Event();
}

ConsumerLog::~ConsumerLog() {
  for (std::size_t i = 0; i < ended_.size(); ++i) {
    if (is_timed_[i]) (void)cudaEventSynchronize(ended_[i].get());
  }
  (void)cudaFreeHost(times_);
}

void ConsumerLog::end_call(cudaStream_t stream) {
  const auto slot = static_cast<std::size_t>(calls_++ % kKept);
  is_timed_[slot] = is_on_;
  if (is_on_) ended_[slot].record(stream);
}

std::optional<ConsumerTimes> ConsumerLog::of_call(std::int64_t number) const {
  const auto slot = static_cast<std::size_t>(number % kKept);
  // The slot of the oldest call is the next one's, which may be half enqueued.
  const bool is_kept = number >= 0 && number < calls_ && number > calls_ - kKept;
  if (!is_kept || !is_timed_[slot] || !ended_[slot].has_come()) return std::nullopt;
  const ConsumerTimes times = times_[slot];
  return times;
}

}  // namespace flashoverlap::cuda
