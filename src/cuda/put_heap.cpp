#include "put_heap.h"

namespace flashoverlap::cuda {

std::shared_ptr<void> PeerHeap::allocate(std::int64_t bytes, std::string_view purpose) {
  const auto buffer = std::make_shared<DeviceBuffer>(device_, bytes, purpose, peers_.readable_memory());
  return {buffer, buffer->data()};
}

}  // namespace flashoverlap::cuda
