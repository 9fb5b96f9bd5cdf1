#include "moe_device.h"

#include <cstring>
#include <utility>
#include <vector>

#include "check.h"
#include "core/fail.h"
#include "gemm_choice.h"
#include "moe_kernels.h"
#include "peer_kernels.h"

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

MoeCudaDevice::MoeCudaDevice(const Options& options) : options_(options), device_(options.device) {
  const DeviceScope scope(device_);
  for (Tables& tables : tables_) tables.used = Event();
  follow_ = Event();
  clock_begin_ = Event(true);
  clock_end_ = Event(true);
  load_moe_kernels();
}

MoeCudaDevice::~MoeCudaDevice() {
  // Of a backward that failed the caller's stream does not wait for it.
  if (side_ != nullptr) (void)cudaStreamSynchronize(side_->get());
  for (const Tables& tables : tables_) {
    if (tables.is_used) (void)cudaEventSynchronize(tables.used.get());
  }
}

void MoeCudaDevice::Tables::wait() const {
  if (is_used) FLASHOVERLAP_CUDA_CHECK(cudaEventSynchronize(used.get()));
}

plan::MoeDevice::TileSize MoeCudaDevice::choose_tile(std::span<const std::vector<std::int64_t>> groups,
                                                     std::int64_t n, std::int64_t k, DType dtype,
                                                     std::int64_t units) const {
  const SignalGemmVariant& variant =
      choose_grouped_variant(device_, dtype, groups, n, k, static_cast<int>(units), options_.gemm_variant);
  return {.rows = variant.tile_rows, .cols = variant.tile_cols};
}

std::optional<plan::MoeDevice::PutTimes> MoeCudaDevice::put_times(std::int64_t call) const {
  const std::optional<ConsumerTimes> times = options_.consumers->of_call(call);
  if (!times) return std::nullopt;
  const auto us = [](std::uint64_t from_ns, std::uint64_t to_ns) {
    return to_ns > from_ns ? static_cast<double>(to_ns - from_ns) / 1e3 : 0;
  };
  return PutTimes{.producer_us = us(times->begin_ns, times->producer_end_ns),
                  .backlog_us = us(times->producer_end_ns, times->end_ns),
                  .idle_us = us(0, times->idle_ns)};
}

void MoeCudaDevice::hold(void* stream) {
  constexpr std::uint64_t kHoldNs = 1'000'000;
  const DeviceScope scope(device_);
  if (hold_begin_.data() == nullptr)
    hold_begin_ = DeviceBuffer(device_, sizeof(std::uint64_t), "the beginning of what is timed");
  auto* const begin_ns = static_cast<std::uint64_t*>(hold_begin_.data());
  launch_pace_begin(begin_ns, native(stream));
  launch_pace_end(begin_ns, kHoldNs, native(stream));
}

void MoeCudaDevice::start_clock(void* stream) {
  clock_begin_.record(native(stream));
}

void MoeCudaDevice::stop_clock(void* stream) {
  clock_end_.record(native(stream));
  is_clocked_ = true;
}

double MoeCudaDevice::clock_us() {
  if (!std::exchange(is_clocked_, false)) return 0;
  FLASHOVERLAP_CUDA_CHECK(cudaEventSynchronize(clock_end_.get()));
  float ms = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, clock_begin_.get(), clock_end_.get()));
  return static_cast<double>(ms) * 1e3;
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
    fit(memory, device_, bytes, options_.memory, "the rows of a layer of experts");
  }
  return memory.data();
}

std::int64_t MoeCudaDevice::reserved_bytes() const {
  std::int64_t bytes = 0;
  for (const DeviceBuffer& buffer : buffers_) bytes += buffer.bytes();
  return bytes + (products_ != nullptr ? products_->workspace_bytes() : 0);
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
  words.reserve(from.source.size() + from.place.size() + from.result.size() + from.weight.size());
  append(words, from.source);
  append(words, from.place);
  append(words, from.result);
  append(words, from.weight);
  to.rows = std::ssize(from.source);
  to.tokens = from.tokens;
  to.top_k = from.top_k;
  const auto bytes = static_cast<std::int64_t>(words.size() * sizeof(std::int32_t));
  fit(to.words, device_, bytes, DeviceMemory::kStreamOrdered, "the row tables of a layer of experts");
  upload(device_, to.words.data(), words.data(), static_cast<std::size_t>(bytes));
}

void* MoeCudaDevice::side_stream() {
  if (side_ == nullptr) {
    side_ = std::make_unique<CudaStream>(device_, CudaStream::Priority::kLow, options_.partition);
  }
  return side_->get();
}

void MoeCudaDevice::follow(void* stream, void* before) {
  if (stream == before) return;
  const DeviceScope scope(device_);
  follow_.record(native(before));
  follow_.wait_on(native(stream));
}

void MoeCudaDevice::gather(const void* x, std::int64_t ldx, std::int64_t cols, DType dtype, bool weighted,
                           void* to, void* stream) {
  const DeviceScope scope(device_);
  const Tables& tables = tables_[current_];
  launch_gather_rows({.source = tables.source(),
                      .top_k = tables.top_k,
                      .place = tables.place(),
                      .weight = weighted ? tables.weight() : nullptr,
                      .dtype = dtype,
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

void MoeCudaDevice::reduce(const void* results, std::int64_t cols, DType dtype, bool weighted, void* out,
                           std::int64_t ldo, void* stream) {
  const DeviceScope scope(device_);
  const Tables& tables = tables_[current_];
  launch_reduce_rows({.dtype = dtype,
                      .row = tables.result(),
                      .weight = weighted ? tables.weight() : nullptr,
                      .tokens = tables.tokens,
                      .top_k = tables.top_k,
                      .cols = cols,
                      .from = results,
                      .to = out,
                      .to_ld = ldo},
                     native(stream));
}

void MoeCudaDevice::activate_backward(const void* h, const void* activated_gradient, std::int64_t rows,
                                      std::int64_t cols, Activation activation, bool gated, DType dtype,
                                      void* h_gradient, void* stream) {
  const DeviceScope scope(device_);
  launch_activate_backward({.dtype = dtype,
                            .activation = activation,
                            .gated = gated,
                            .rows = rows,
                            .cols = cols,
                            .from = h,
                            .gradient = activated_gradient,
                            .to_gradient = h_gradient},
                           native(stream));
}

void MoeCudaDevice::transpose(const void* from, std::int64_t count, std::int64_t rows, std::int64_t cols,
                              void* to, void* stream) {
  const DeviceScope scope(device_);
  launch_transpose({.count = count, .rows = rows, .cols = cols, .from = from, .to = to}, native(stream));
}

void MoeCudaDevice::weight_gradient(const void* out_gradient, std::int64_t ldg, const void* results,
                                    std::int64_t cols, DType dtype, float* gradient, void* stream) {
  const DeviceScope scope(device_);
  const Tables& tables = tables_[current_];
  launch_weight_gradient({.dtype = dtype,
                          .row = tables.result(),
                          .tokens = tables.tokens,
                          .top_k = tables.top_k,
                          .cols = cols,
                          .out_gradient = out_gradient,
                          .out_gradient_ld = ldg,
                          .results = results,
                          .gradient = gradient},
                         native(stream));
}

void MoeCudaDevice::set_expert_rows(const plan::MoeExpertRows& rows) {
  Tables& to = tables_[current_];
  to.expert_begin = rows.begin;  // set_rows has waited for whoever used the one before
  const auto bytes = static_cast<std::int64_t>(rows.row.size() * sizeof(std::int32_t));
  fit(to.expert_rows, device_, bytes, DeviceMemory::kStreamOrdered, "the row tables of a layer of experts");
  upload(device_, to.expert_rows.data(), rows.row.data(), static_cast<std::size_t>(bytes));
}

void MoeCudaDevice::order_by_expert(const void* from, std::int64_t cols, void* to, void* stream) {
  const DeviceScope scope(device_);
  const Tables& tables = tables_[current_];
  launch_gather_rows({.source = static_cast<const std::int32_t*>(tables.expert_rows.data()),
                      .rows = tables.expert_begin.back(),
                      .cols = cols,
                      .from = from,
                      .from_ld = cols,
                      .to = to},
                     native(stream));
}

void MoeCudaDevice::multiply_by_expert(const void* left, std::int64_t left_cols, const void* right,
                                       std::int64_t right_cols, DType dtype, float* to, void* stream) {
  if (left_cols == 0 || right_cols == 0) return;
  const DeviceScope scope(device_);
  const std::vector<std::int64_t>& begin = tables_[current_].expert_begin;
  const auto row_of = [&](const void* rows, std::int64_t row, std::int64_t cols) {
    return static_cast<const char*>(rows) + row * cols * size_of(dtype);
  };
  for (std::size_t e = 0; e + 1 < begin.size(); ++e, to += left_cols * right_cols) {
    const std::int64_t rows = begin[e + 1] - begin[e];
    if (rows == 0) {
      const auto bytes = static_cast<std::size_t>(left_cols * right_cols) * sizeof(float);
      FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, native(stream)));
      continue;
    }
    products().launch({.m = left_cols, .n = right_cols, .k = rows, .dtype = dtype},
                      row_of(left, begin[e], left_cols), row_of(right, begin[e], right_cols), to,
                      native(stream));
  }
}

CublasProducts& MoeCudaDevice::products() {
  if (products_ == nullptr) products_ = std::make_unique<CublasProducts>(device_, options_.num_sms);
  return *products_;
}

void MoeCudaDevice::end(void* stream) {
  const DeviceScope scope(device_);
  tables_[current_].used.record(native(stream));
  tables_[current_].is_used = true;
}

}  // namespace flashoverlap::cuda
