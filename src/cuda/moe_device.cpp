#include "moe_device.h"

#include <cstring>
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
void append(std::vector<std::int32_t>& words, const std::vector<Value>& values) {
  static_assert(sizeof(Value) == sizeof(std::int32_t));
  const std::size_t begin = words.size();
  words.resize(begin + values.size());
  if (!values.empty()) std::memcpy(words.data() + begin, values.data(), values.size() * sizeof(Value));
}

}  // namespace

MoeCudaDevice::MoeCudaDevice(int device, DeviceMemory kind) : device_(device), kind_(kind) {
  const DeviceScope scope(device);
  for (Tables& tables : tables_) tables.used = Event();
  load_moe_kernels();
}

MoeCudaDevice::~MoeCudaDevice() {
  for (const Tables& tables : tables_) {
    if (tables.is_used) (void)cudaEventSynchronize(tables.used.get());
  }
}

void MoeCudaDevice::Tables::wait() const {
  if (is_used) FLASHOVERLAP_CUDA_CHECK(cudaEventSynchronize(used.get()));
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
    for (const Tables& tables : tables_) tables.wait();
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

void MoeCudaDevice::set_rows(const plan::MoeRowTables& from) {
  current_ = 1 - current_;
  Tables& to = tables_[current_];
  to.wait();
  std::vector<std::int32_t> words;
  words.reserve(from.token.size() + from.place.size() + from.result.size() + from.weight.size());
  append(words, from.token);
  append(words, from.place);
  append(words, from.result);
  append(words, from.weight);
  to.rows = std::ssize(from.token);
  to.tokens = from.tokens;
  to.top_k = from.top_k;
  const auto bytes = static_cast<std::int64_t>(words.size() * sizeof(std::int32_t));
  fit(to.words, device_, bytes, DeviceMemory::kStreamOrdered, "the row tables of a layer of experts");
  upload(device_, to.words.data(), words.data(), static_cast<std::size_t>(bytes));
}

void MoeCudaDevice::gather(const void* x, std::int64_t ldx, std::int64_t cols, DType /*dtype*/, void* to,
                           void* stream) {
  const DeviceScope scope(device_);
  const Tables& tables = tables_[current_];
  launch_gather_rows({.token = tables.token(),
                      .place = tables.place(),
                      .rows = tables.rows,
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
  const Tables& tables = tables_[current_];
  launch_reduce_rows({.dtype = dtype,
                      .row = tables.result(),
                      .weight = tables.weight(),
                      .tokens = tables.tokens,
                      .top_k = tables.top_k,
                      .cols = cols,
                      .from = results,
                      .to = out,
                      .to_ld = ldo},
                     native(stream));
}

void MoeCudaDevice::end(void* stream) {
  const DeviceScope scope(device_);
  tables_[current_].used.record(native(stream));
  tables_[current_].is_used = true;
}

}  // namespace flashoverlap::cuda
