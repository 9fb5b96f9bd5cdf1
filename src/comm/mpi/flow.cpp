#include "comm/mpi/flow.h"

#include <algorithm>
#include <utility>

namespace flashoverlap::comm::mpi {

Flow::Flow(Requests& requests, const Spec& spec, std::function<void()> on_progress)
    : requests_(requests),
      spec_(spec),
      on_progress_(std::move(on_progress)),
      num_segments_(segments_of(spec.bytes)) {}

void Flow::allow(std::int64_t segments) {
  allowed_ = std::max(allowed_, std::min(segments, num_segments_));
  pump();
}

void Flow::pump() {
  while (next_ < allowed_ && next_ - completed_ < kWindow) {
    const std::int64_t segment = next_++;
    is_complete_.push_back(false);
    const std::int64_t place = spec_.is_ring ? segment % kWindow : segment;
    std::byte* data = spec_.data + place * kSegmentBytes;
    auto then = [this, segment](int bytes) { complete(segment, bytes); };
    if (spec_.is_receive) {
      requests_.receive(data, bytes_of(segment), spec_.peer, spec_.tag, std::move(then));
    } else {
      requests_.send(data, bytes_of(segment), spec_.peer, spec_.tag, std::move(then));
    }
  }
}

void Flow::complete(std::int64_t segment, int bytes) {
  if (spec_.is_receive && bytes != bytes_of(segment)) has_wrong_size_ = true;
  is_complete_[static_cast<std::size_t>(segment - completed_)] = true;
  std::size_t prefix = 0;
  while (prefix < is_complete_.size() && is_complete_[prefix]) ++prefix;
  is_complete_.erase(is_complete_.begin(), is_complete_.begin() + static_cast<std::ptrdiff_t>(prefix));
  completed_ += static_cast<std::int64_t>(prefix);
  pump();
  if (on_progress_) on_progress_();
}

std::int64_t Flow::bytes_of(std::int64_t segment) const {
  return std::min(kSegmentBytes, spec_.bytes - segment * kSegmentBytes);
}

}  // namespace flashoverlap::comm::mpi
