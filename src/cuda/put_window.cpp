#include "put_window.h"

#include <algorithm>
#include <set>
#include <string>

#include "check.h"
#include "core/fail.h"
#include "cuda_stream.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::string_view kPurpose = "what other ranks put here";

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

std::string name_of_device(int device) {
  cudaDeviceProp properties{};
  FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return {properties.uuid.bytes, sizeof properties.uuid.bytes};
}

template <class T>
DeviceBuffer uploaded(int device, const std::vector<T>& values) {
  const std::size_t bytes = values.size() * sizeof(T);
  DeviceBuffer buffer(device, static_cast<std::int64_t>(bytes), "the table of puts");
  upload(device, buffer.data(), values.data(), bytes);
  return buffer;
}

}  // namespace

DevicePuts::DevicePuts(int device, PutTable table)
    : table_(std::move(table)),
      puts_(uploaded(device, table_.puts)),
      done_(uploaded(device, std::vector<std::uint32_t>(table_.puts.size(), 0))) {}

PutWindow::PutWindow(int device, Communicator& communicator, PutHeap& heap)
    : device_(device),
      heap_(heap),
      timeout_(communicator.timeout()),
      rank_(communicator.rank()),
      size_(communicator.size()),
      ranks_(index(size_)),
      sent_(index(size_), 0),
      received_(index(size_), 0) {
  const std::vector<std::string> names =
      communicator.exchange(name_of_device(device), {.operation = kPurpose});
  ranks_here_ = static_cast<int>(std::ranges::count(names, names[index(rank_)]));
  shares_device_ = std::set<std::string>(names.begin(), names.end()).size() < names.size();
  used_ = Event();
  load_put_kernels();
}

void PutWindow::grow(std::int64_t bytes) {
  if (is_used_) {  // all puts of the calls before are there once they have ended
    CudaStream stream(device_, CudaStream::Priority::kLow);
    used_.wait_on(stream.get());
    stream.set_timeout(timeout_ + std::chrono::seconds(5));
    stream.synchronize();
  }
  buffers_ = {};
  bytes_ = 0;
  for (std::shared_ptr<void>& buffer : buffers_) buffer = heap_.allocate(kWordsBytes + bytes, kPurpose);
  bytes_ = bytes;
  std::vector<std::uint32_t> words(kWordsBytes / sizeof(std::uint32_t), 0);
  for (int r = 0; r < size_; ++r) words[index(r * kStride)] = received_[index(r)];
  upload(device_, buffers_[0].get(), words.data(), kWordsBytes);
}

void PutWindow::open(std::int64_t bytes, const TransferLabel& label) {
  // By a half more, so that counts that vary from call to call do not make it grow in each.
  if (bytes > bytes_ || buffers_[0] == nullptr) grow(bytes + bytes / 2);
  const std::vector<PeerMemory> all = heap_.share({buffers_[0].get(), buffers_[1].get()}, label);
  for (int r = 0; r < size_; ++r) {
    auto* const first = static_cast<char*>(all[index(r)].first);
    auto* const second = static_cast<char*>(all[index(r)].second);
    ranks_[index(r)] = {.received = {first + kWordsBytes, second + kWordsBytes},
                        .counts = reinterpret_cast<std::uint32_t*>(first)};
  }
}

void* PutWindow::received() const {
  return ranks_[index(rank_)].received[turn_];
}

void PutWindow::fill(ConsumerParams& params) const {
  for (int r = 0; r < size_; ++r) {
    params.received[r] = ranks_[index(r)].received[turn_];
    params.count[r] = ranks_[index(r)].counts + static_cast<std::ptrdiff_t>(rank_) * kStride;
    params.before[r] = sent_[index(r)];
  }
}

void PutWindow::fill(WaitForPutsParams& params, const PutTable& table) const {
  params.counts = ranks_[index(rank_)].counts;
  params.stride = kStride;
  params.num_ranks = size_;
  for (int r = 0; r < size_; ++r) {
    params.puts[r] = table.received[index(r)];
    params.expected[r] = received_[index(r)] + table.received[index(r)];
  }
}

void PutWindow::end_call(const PutTable& table, bool poisons, cudaStream_t stream) {
  if (poisons && bytes_ > 0) {
    // Nobody writes here before the call after the next one.
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(received(), 0xFF, static_cast<std::size_t>(bytes_), stream));
  }
  for (int r = 0; r < size_; ++r) {
    sent_[index(r)] += table.sent[index(r)];
    received_[index(r)] += table.received[index(r)];
  }
  turn_ = 1 - turn_;
  used_.record(stream);
  is_used_ = true;
}

}  // namespace flashoverlap::cuda
