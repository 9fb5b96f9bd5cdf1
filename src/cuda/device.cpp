#include "device.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "check.h"
#include "core/fail.h"
#include "device_copy.h"
#include "nccl_library.h"

namespace flashoverlap::cuda {
namespace {

// Freed memory stays in the pool: giving it back to the driver waits for the device.
void keep_pool_memory(int device) {
  cudaMemPool_t pool = nullptr;
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, device));
  std::uint64_t threshold = UINT64_MAX;
  FLASHOVERLAP_CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  for (int peer = 0; peer < device_count(); ++peer) {
    int reachable = 0;
    if (peer == device) continue;
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceCanAccessPeer(&reachable, peer, device));
    if (reachable == 0) continue;
    cudaMemAccessDesc access{};
    access.location = {cudaMemLocationTypeDevice, {peer}};
    access.flags = cudaMemAccessFlagsProtReadWrite;
    FLASHOVERLAP_CUDA_CHECK(cudaMemPoolSetAccess(pool, &access, 1));
  }
}

// A block of the driver's of its own for what other processes open: they can open only whole blocks, and an
// allocation that shares one with another that was open before not at all.
std::size_t shareable_size(std::size_t size) {
  constexpr std::size_t kBlock = std::size_t{2} << 20;
  return (size + kBlock - 1) / kBlock * kBlock;
}

// The current device's, or null where there is too little.
void* allocate(DeviceMemory kind, std::size_t size, cudaStream_t stream) {
  void* data = nullptr;
  if (kind == DeviceMemory::kNccl) {
    // NCCL says why only in its log; there is little else that can go wrong.
    return nccl().mem_alloc(&data, size) == ncclSuccess ? data : nullptr;
  }
  const cudaError_t status = kind == DeviceMemory::kShareable ? cudaMalloc(&data, shareable_size(size))
                                                              : cudaMallocAsync(&data, size, stream);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  FLASHOVERLAP_CUDA_CHECK(status);
  return data;
}

}  // namespace

DeviceScope::DeviceScope(int device) {
  FLASHOVERLAP_CUDA_CHECK(cudaGetDevice(&previous_));
  FLASHOVERLAP_CUDA_CHECK(cudaSetDevice(device));
}

DeviceScope::~DeviceScope() {
  (void)cudaSetDevice(previous_);
}

void prepare_environment() {
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return count;
}

void require_device(int device) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    core::fail(ErrorKind::kUnsupported, "no CUDA device: {}",
               status == cudaSuccess ? "the driver finds none" : cudaGetErrorString(status));
  }
  if (device < 0 || device >= count) {
    core::fail(ErrorKind::kBadArgument, "device {} asked for, this machine has devices 0 to {}", device,
               count - 1);
  }
}

cudaStream_t memory_stream(int device) {
  static std::mutex mutex;
  static std::map<int, cudaStream_t> streams;
  const std::scoped_lock lock(mutex);
  if (const auto found = streams.find(device); found != streams.end()) return found->second;
  const DeviceScope scope(device);
  keep_pool_memory(device);
  cudaStream_t stream = nullptr;
  FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  streams.emplace(device, stream);
  return stream;
}

std::shared_ptr<const void> copy_to_device(const void* data, std::size_t bytes, std::string_view purpose) {
  const int device = current_device();
  const auto buffer = std::make_shared<const DeviceBuffer>(device, static_cast<std::int64_t>(bytes), purpose);
  upload(device, buffer->data(), data, bytes);
  return {buffer, buffer->data()};
}

int current_device() {
  int device = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

DeviceBuffer::DeviceBuffer(int device, std::int64_t bytes, std::string_view purpose, DeviceMemory kind)
    : bytes_(bytes), device_(device), kind_(kind) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  const cudaStream_t stream = memory_stream(device);
  data_ = allocate(kind, static_cast<std::size_t>(bytes), stream);
  if (data_ == nullptr) {
    std::size_t available = 0;
    std::size_t total = 0;
    (void)cudaMemGetInfo(&available, &total);
    core::fail(ErrorKind::kOutOfMemory, "{} needs {} bytes on device {}; {} of {} bytes are free", purpose,
               bytes, device, available, total);
  }
  FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(stream));
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  switch (kind_) {
    case DeviceMemory::kStreamOrdered:
      (void)cudaFreeAsync(data_, memory_stream(device_));
      break;
    case DeviceMemory::kShareable:
      (void)cudaFree(data_);
      break;
    case DeviceMemory::kNccl:
      (void)nccl().mem_free(data_);
      break;
  }
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_),
      kind_(other.kind_) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(kind_, other.kind_);
  return *this;
}

void upload(int device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  const cudaStream_t stream = memory_stream(device);
  FLASHOVERLAP_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
  FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(stream));
}

Event::Event(bool with_timing) {
  FLASHOVERLAP_CUDA_CHECK(
      cudaEventCreateWithFlags(&event_, with_timing ? cudaEventDefault : cudaEventDisableTiming));
}

Event Event::for_processes() {
  cudaEvent_t event = nullptr;
  FLASHOVERLAP_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
  return Event(event);
}

Event Event::of_process(const cudaIpcEventHandle_t& handle) {
  cudaEvent_t event = nullptr;
  FLASHOVERLAP_CUDA_CHECK(cudaIpcOpenEventHandle(&event, handle));
  return Event(event);
}

Event::~Event() {
  if (event_ != nullptr) (void)cudaEventDestroy(event_);
}

Event::Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(event_, other.event_);
  return *this;
}

void Event::record(cudaStream_t stream) const {
  FLASHOVERLAP_CUDA_CHECK(cudaEventRecord(event_, stream));
}

void Event::wait_on(cudaStream_t stream) const {
  FLASHOVERLAP_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
}

bool Event::has_come() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) return false;
  FLASHOVERLAP_CUDA_CHECK(status);
  return true;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  FLASHOVERLAP_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace flashoverlap::cuda
