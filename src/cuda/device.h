// The current device, its memory, streams and events, as objects that clean up after themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace flashoverlap::cuda {

/// Makes `device` current in this thread, and the one before it again at the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
};

/// Throws Error(kUnsupported) when this machine has no usable CUDA device, Error(kBadArgument) when `device`
/// is not one.
void require_device(int device);

/// Before CUDA starts, and where the environment says nothing else: kernels loaded lazily behind a stream
/// that waits hang, and ranks that share a GPU need a queue for each of their streams.
void prepare_environment();

/// The number of CUDA devices; 0 where there is none or no driver.
int device_count();

enum class DeviceMemory {
  /// Allocated and freed in stream order on a stream of its own, so that neither ever waits for the device:
  /// with several ranks on one GPU a plain cudaFree would wait for a collective that waits for the rank that
  /// frees.
  kStreamOrdered,
  kShareable,  ///< From cudaMalloc: other processes can open it.
  /// From ncclMemAlloc: NCCL can register it. Freeing it may wait for the devices that can reach it.
  kNccl,
};

/// Device memory. Whoever destroys a buffer makes sure that the device is done with it.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// Throws Error(kOutOfMemory) naming the bytes asked for, the bytes free and `purpose`. kNccl is for where
  /// NCCL is known to have it (kNcclBuffersVersion).
  DeviceBuffer(int device, std::int64_t bytes, std::string_view purpose,
               DeviceMemory kind = DeviceMemory::kStreamOrdered);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  int device_ = 0;
  DeviceMemory kind_ = DeviceMemory::kStreamOrdered;
};

/// Copies from host memory, and returns when it is there.
void upload(int device, void* to, const void* from, std::size_t bytes);

/// The device that is current in this thread.
int current_device();

/// A stream of the library's own for memory and copies, one per device. Nothing ever waits on it.
cudaStream_t memory_stream(int device);

/// A CUDA event.
class Event {
 public:
  explicit Event(bool with_timing = false);
  /// One that other processes can open by its cudaIpcEventHandle_t.
  static Event for_processes();
  /// Another process's. Throws Error(kDevice).
  static Event of_process(const cudaIpcEventHandle_t& handle);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;

  [[nodiscard]] cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const;
  void wait_on(cudaStream_t stream) const;  ///< `stream` goes on once the event has come.
  [[nodiscard]] bool has_come() const;

 private:
  explicit Event(cudaEvent_t event) : event_(event) {}

  cudaEvent_t event_ = nullptr;
};

/// Whether `stream` is being captured into a graph.
bool is_capturing(cudaStream_t stream);

}  // namespace flashoverlap::cuda
