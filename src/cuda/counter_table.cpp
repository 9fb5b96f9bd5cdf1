#include "counter_table.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "check.h"
#include "device.h"

namespace flashoverlap::cuda {
namespace {

// Free stretches of counters, per device. Tables are few and short, so the first stretch that fits is good
// enough.
class Pool {
 public:
  static Pool& of_process() {
    static Pool pool;
    return pool;
  }

  std::uint32_t* take(int device, std::int64_t count) {
    const std::lock_guard lock(mutex_);
    std::vector<Stretch>& free = free_[device];
    auto found = std::find_if(free.begin(), free.end(),
                              [count](const Stretch& stretch) { return stretch.count >= count; });
    if (found == free.end()) {
      const std::int64_t page = std::max(count, kPageCounters);
      void* data = nullptr;
      FLASHOVERLAP_CUDA_CHECK(cudaMalloc(&data, static_cast<std::size_t>(page) * sizeof(std::uint32_t)));
      found = free.insert(free.end(), {static_cast<std::uint32_t*>(data), page});
    }
    std::uint32_t* const data = found->data;
    found->data += count;
    found->count -= count;
    if (found->count == 0) free.erase(found);
    return data;
  }

  void give_back(int device, std::uint32_t* data, std::int64_t count) noexcept {
    const std::lock_guard lock(mutex_);
    std::vector<Stretch>& free = free_[device];
    const auto before = std::find_if(free.begin(), free.end(), [data](const Stretch& stretch) {
      return stretch.data + stretch.count == data;
    });
    if (before != free.end()) {
      before->count += count;
    } else {
      free.push_back({data, count});
    }
  }

 private:
  static constexpr std::int64_t kPageCounters = 16384;
  struct Stretch {
    std::uint32_t* data;
    std::int64_t count;
  };
  std::mutex mutex_;
  std::map<int, std::vector<Stretch>> free_;
};

}  // namespace

CounterTable::CounterTable(int device, std::int64_t count) : device_(device), count_(count) {
  if (count == 0) return;
  const DeviceScope scope(device);
  data_ = Pool::of_process().take(device, count);
  const std::vector<std::uint32_t> zeros(static_cast<std::size_t>(count), 0);
  upload(device, data_, zeros.data(), zeros.size() * sizeof(std::uint32_t));
}

CounterTable::~CounterTable() {
  if (data_ != nullptr) Pool::of_process().give_back(device_, data_, count_);
}

}  // namespace flashoverlap::cuda
