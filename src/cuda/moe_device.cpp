#include "moe_device.h"

#include <vector>

#include "check.h"
#include "core/fail.h"
#include "moe_kernels.h"

namespace flashoverlap::cuda {
namespace {

cudaStream_t native(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

// Grows by a half more, so that counts that vary from call to call do not make it grow in each.
void fit(DeviceBuffer& buffer, int device, std::int64_t bytes, DeviceMemory kind, std::string_view purpose) {
  if (buffer.bytes() >= bytes) return;
  buffer = DeviceBuffer();
  buffer = DeviceBuffer(device, bytes + bytes / 2, purpose, kind);
}

template <class Value>
void fill(DeviceBuffer& buffer, int device, const std::vector<Value>& values) {
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(Value));
  fit(buffer, device, bytes, DeviceMemory::kStreamOrdered, "the row tables of a layer of experts");
  upload(device, buffer.data(), values.data(), static_cast<std::size_t>(bytes));
}

}  // namespace

MoeCudaDevice::MoeCudaDevice(int device, DeviceMemory kind) : device_(device), kind_(kind) {
  const DeviceScope scope(device);
  load_moe_kernels();
}

MoeCudaDevice::~MoeCudaDevice() {
  if (has_call_) (void)cudaEventSynchronize(last_call_.get());
}

void MoeCudaDevice::wait_for_last_call() const {
  if (has_call_) FLASHOVERLAP_CUDA_CHECK(cudaEventSynchronize(last_call_.get()));
}

void MoeCudaDevice::check_address(std::string_view name, const void* address) const {
  cudaPointerAttributes attributes{};
  FLASHOVERLAP_CUDA_CHECK(cudaPointerGetAttributes(&attributes, address));
  if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
    core::fail(ErrorKind::kBadArgument, "{} at {} is host memory; memory of device {} is expected", name,
               address, device_);
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device_) {
    core::fail(ErrorKind::kBadArgument, "{} at {} is on device {}; device {} is expected", name, address,
               attributes.device, device_);
  }
}

void* MoeCudaDevice::reserve(Buffer buffer, std::int64_t bytes) {
  DeviceBuffer& memory = at(buffer);
  if (memory.bytes() < bytes) {
    wait_for_last_call();
    fit(memory, device_, bytes, kind_, "the rows of a layer of experts");
  }
  return memory.data();
}

std::int64_t MoeCudaDevice::reserved_bytes() const {
  std::int64_t bytes = 0;
  for (const DeviceBuffer& buffer : buffers_) bytes += buffer.bytes();
  return bytes;
}

void MoeCudaDevice::poison(Buffer buffer, void* stream) {
  const DeviceBuffer& memory = at(buffer);
  constexpr int kNaN = 0xFF;  // in both types of 16 bits
  if (memory.bytes() > 0) {
    FLASHOVERLAP_CUDA_CHECK(
        cudaMemsetAsync(memory.data(), kNaN, static_cast<std::size_t>(memory.bytes()), native(stream)));
  }
}

void MoeCudaDevice::set_rows(const plan::MoeRowTables& tables) {
  wait_for_last_call();
  fill(tables_.token, device_, tables.token);
  fill(tables_.place, device_, tables.place);
  fill(tables_.result, device_, tables.result);
  fill(tables_.weight, device_, tables.weight);
  tables_.rows = std::ssize(tables.token);
  tables_.tokens = tables.tokens;
  tables_.top_k = tables.top_k;
}

void MoeCudaDevice::gather(const void* x, std::int64_t ldx, std::int64_t cols, DType /*dtype*/, void* to,
                           void* stream) {
  const DeviceScope scope(device_);
  launch_gather_rows({.token = static_cast<const std::int32_t*>(tables_.token.data()),
                      .place = static_cast<const std::int32_t*>(tables_.place.data()),
                      .rows = tables_.rows,
                      .cols = cols,
                      .from = x,
                      .from_ld = ldx,
                      .to = to},
                     native(stream));
}

void MoeCudaDevice::activate(const void* h, std::int64_t rows, std::int64_t cols, Activation activation,
                             bool gated, DType dtype, void* activated, void* stream) {
  const DeviceScope scope(device_);
  launch_activate_rows({.dtype = dtype,
                        .activation = activation,
                        .gated = gated,
                        .rows = rows,
                        .cols = cols,
                        .from = h,
                        .to = activated},
                       native(stream));
}

void MoeCudaDevice::reduce(const void* results, std::int64_t cols, DType dtype, void* out, std::int64_t ldo,
                           void* stream) {
  const DeviceScope scope(device_);
  launch_reduce_rows({.dtype = dtype,
                      .row = static_cast<const std::int32_t*>(tables_.result.data()),
                      .weight = static_cast<const float*>(tables_.weight.data()),
                      .tokens = tables_.tokens,
                      .top_k = tables_.top_k,
                      .cols = cols,
                      .from = results,
                      .to = out,
                      .to_ld = ldo},
                     native(stream));
}

void MoeCudaDevice::end(void* stream) {
  const DeviceScope scope(device_);
  last_call_.record(native(stream));
  has_call_ = true;
}

}  // namespace flashoverlap::cuda
