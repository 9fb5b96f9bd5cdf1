// A device of host memory, with the plainest passes, for the layer whose rows lie on a device.
#pragma once

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/half.h"
#include "cpu/epilogue.h"
#include "cpu/thread_pool.h"
#include "flashoverlap/error.h"
#include "flashoverlap/executor.h"
#include "flashoverlap/moe_layer.h"
#include "ops/moe_passes.h"
#include "ops/moe_reference.h"
#include "plan/moe_device.h"

namespace flashoverlap::test {

/// Every call is noted, and memory that it does not know is refused.
class HostDevice final : public plan::MoeDevice {
 public:
  [[nodiscard]] std::int64_t most_consumers() const override { return 16; }
  [[nodiscard]] std::int64_t num_units() const override { return units; }
  [[nodiscard]] bool consumers_take_units() const override { return true; }
  [[nodiscard]] TileSize choose_tile(std::span<const std::vector<std::int64_t>> groups, std::int64_t n,
                                     std::int64_t k, DType /*dtype*/, std::int64_t by_units) const override {
    EXPECT_FALSE(groups.empty());
    EXPECT_GT(std::min(n, k), 0);
    tile_units.insert(by_units);
    return {.rows = 4, .cols = 8};
  }
  void time_puts(bool on) override { times_puts = on; }
  [[nodiscard]] std::int64_t put_calls() const override { return std::ssize(put_times_); }
  [[nodiscard]] std::optional<PutTimes> put_times(std::int64_t call) const override {
    return call + lag < put_calls() ? put_times_[at(call)] : std::nullopt;
  }
  void hold(void* stream) override { streams.insert(stream); }
  void start_clock(void* stream) override { streams.insert(stream); }
  void stop_clock(void* stream) override { streams.insert(stream); }
  [[nodiscard]] double clock_us() override { return next_clock_us; }
  void check_address(std::string_view name, const void* address) const override {
    if (refused.contains(address))
      throw Error(ErrorKind::kBadArgument, fmt::format("{} at {} is refused", name, address));
  }
  void* reserve(Buffer buffer, std::int64_t bytes) override {
    std::vector<std::byte>& memory = buffers_[buffer];
    if (std::ssize(memory) < bytes) memory.assign(at(bytes), std::byte{0xFF});
    return memory.empty() ? nullptr : memory.data();
  }
  [[nodiscard]] std::int64_t reserved_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [buffer, memory] : buffers_) bytes += std::ssize(memory);
    return bytes;
  }
  void poison(Buffer buffer, void* stream) override {
    note("poison", stream);
    std::ranges::fill(buffers_[buffer], std::byte{0xFF});
  }
  void set_rows(const plan::MoeRowTables& tables) override { tables_ = tables; }

  void* side_stream() override { return &side_; }
  void follow(void* stream, void* before) override {
    if (stream != before) calls.emplace_back(stream == &side_ ? "fork" : "join");
  }

  void gather(const void* x, std::int64_t ldx, std::int64_t cols, DType dtype, bool weighted, void* to,
              void* stream) override {
    note("gather", stream);
    for (std::size_t i = 0; i < tables_.source.size(); ++i) {
      const std::int32_t source = tables_.source[i];
      const float weight = !weighted ? 1 : source < 0 ? 0 : tables_.weight[at(source)];
      const Row from(x, source < 0 ? -1 : source / tables_.top_k * ldx, cols, dtype);
      from.times(weight).write(to, tables_.place[i] * cols);
    }
  }
  void activate(const void* h, std::int64_t rows, std::int64_t cols, Activation activation, bool gated,
                DType dtype, void* activated, void* stream) override {
    note("activate", stream);
    const std::int64_t middle = gated ? 2 * cols : cols;
    std::vector<float> values(at(middle));
    for (std::int64_t row = 0; row < rows; ++row) {
      core::to_float(static_cast<const std::byte*>(h) + row * middle * size_of(dtype), dtype, values.data(),
                     middle);
      cpu::activate(activation, values.data(), cols);
      for (std::int64_t i = 0; gated && i < cols; ++i) values[at(i)] *= values[at(cols + i)];
      core::from_float(values.data(), dtype, static_cast<std::byte*>(activated) + row * cols * size_of(dtype),
                       cols);
    }
  }
  void reduce(const void* results, std::int64_t cols, DType dtype, bool weighted, void* out, std::int64_t ldo,
              void* stream) override {
    note("reduce", stream);
    for (std::int64_t token = 0; token < tables_.tokens; ++token) {
      Row sum(nullptr, -1, cols, dtype);
      for (std::int64_t i = token * tables_.top_k; i < (token + 1) * tables_.top_k; ++i) {
        const std::int64_t row = tables_.result[at(i)];
        if (row < 0) continue;
        const Row result(results, row * cols, cols, dtype);
        const float weight = weighted ? tables_.weight[at(i)] : 1;
        for (std::int64_t c = 0; c < cols; ++c) sum.values[at(c)] += weight * result.values[at(c)];
      }
      sum.write(out, token * ldo);
    }
  }

  void activate_backward(const void* h, const void* activated_gradient, std::int64_t rows, std::int64_t cols,
                         Activation activation, bool gated, DType dtype, void* h_gradient,
                         void* stream) override {
    note("activate_backward", stream);
    cpu::ThreadPool pool(1, "device");
    ops::activate_backward(pool, {activation, gated, cols}, rows, dtype, static_cast<const std::byte*>(h),
                           static_cast<const std::byte*>(activated_gradient),
                           static_cast<std::byte*>(h_gradient));
  }
  void transpose(const void* from, std::int64_t count, std::int64_t rows, std::int64_t cols, void* to,
                 void* stream) override {
    note("transpose", stream);
    for (std::int64_t i = 0; i < count * rows * cols; ++i) {
      const std::int64_t matrix = i / (rows * cols) * rows * cols;
      const std::int64_t row = (i - matrix) / cols;
      const std::int64_t col = (i - matrix) % cols;
      static_cast<std::uint16_t*>(to)[matrix + col * rows + row] = static_cast<const std::uint16_t*>(from)[i];
    }
  }
  void weight_gradient(const void* out_gradient, std::int64_t ldg, const void* results, std::int64_t cols,
                       DType dtype, float* gradient, void* stream) override {
    note("weight_gradient", stream);
    for (std::int64_t i = 0; i < std::ssize(tables_.result); ++i) {
      const Row result(results, tables_.result[at(i)] * cols, cols, dtype);
      const Row by_out(out_gradient, i / tables_.top_k * ldg, cols, dtype);
      double sum = 0;
      for (std::int64_t c = 0; c < cols; ++c)
        sum += static_cast<double>(by_out.values[at(c)]) * static_cast<double>(result.values[at(c)]);
      gradient[i] = static_cast<float>(sum);
    }
  }

  void set_expert_rows(const plan::MoeExpertRows& rows) override {
    expert_rows_ = rows;
    for (const std::int64_t begin : rows.begin) EXPECT_EQ(begin % plan::MoeExpertRows::kUnit, 0);
  }
  void order_by_expert(const void* from, std::int64_t cols, void* to, void* stream) override {
    note("order", stream);
    for (std::int64_t i = 0; i < std::ssize(expert_rows_.row); ++i) {
      Row(from, expert_rows_.row[at(i)] * cols, cols, DType::kBFloat16).write(to, i * cols);
    }
  }
  void multiply_by_expert(const void* left, std::int64_t left_cols, const void* right,
                          std::int64_t right_cols, DType dtype, float* to, void* stream) override {
    note("multiply", stream);
    for (std::size_t e = 0; e + 1 < expert_rows_.begin.size(); ++e, to += left_cols * right_cols) {
      Doubles sums(at(left_cols * right_cols));
      for (std::int64_t row = expert_rows_.begin[e]; row < expert_rows_.begin[e + 1]; ++row) {
        const Row a(left, row * left_cols, left_cols, dtype);
        const Row b(right, row * right_cols, right_cols, dtype);
        for (std::size_t i = 0; i < sums.size(); ++i)
          sums[i] += static_cast<double>(a.values[i / at(right_cols)]) *
                     static_cast<double>(b.values[i % at(right_cols)]);
      }
      std::ranges::transform(sums, to, [](double sum) { return static_cast<float>(sum); });
    }
  }
  void end(void* stream) override { note("end", stream); }

  std::set<const void*> refused;
  std::vector<std::string> calls;
  std::set<void*> streams;
  bool times_puts = false;
  mutable std::set<std::int64_t> tile_units;
  std::int64_t units = 32;
  double next_clock_us = 0;
  std::function<PutTimes(const Resources&)> machine;  ///< What a plan with puts takes.
  std::int64_t lag = 0;                               ///< Calls after which that is known.

  void run_puts(const OverlapPlan& plan) {
    put_times_.push_back(machine ? std::optional(machine(plan.resources)) : std::nullopt);
  }

 private:
  /// A row in float32; zeros where it does not begin in the matrix.
  struct Row {
    Row(const void* matrix, std::int64_t begin, std::int64_t cols, DType type)
        : values(at(cols)), dtype(type) {
      if (begin < 0) return;
      core::to_float(static_cast<const std::byte*>(matrix) + begin * size_of(dtype), dtype, values.data(),
                     cols);
    }
    [[nodiscard]] Row times(float weight) const {
      Row row = *this;
      for (float& value : row.values) value *= weight;
      return row;
    }
    void write(void* matrix, std::int64_t begin) const {
      core::from_float(values.data(), dtype, static_cast<std::byte*>(matrix) + begin * size_of(dtype),
                       std::ssize(values));
    }
    std::vector<float> values;
    DType dtype;
  };

  /// What goes into the side stream has a mark.
  void note(const std::string& call, void* stream) {
    const std::string noted = stream == &side_ ? call + "*" : call;
    if (calls.empty() || calls.back() != noted) calls.push_back(noted);
    if (stream != &side_) streams.insert(stream);
  }

  std::map<Buffer, std::vector<std::byte>> buffers_;
  std::vector<std::optional<PutTimes>> put_times_;
  plan::MoeRowTables tables_;
  plan::MoeExpertRows expert_rows_;
  int side_ = 0;
};

/// The CPU's executor, which says that its operands lie on a device.
class DeviceExecutor final : public Executor {
 public:
  DeviceExecutor(std::unique_ptr<Executor> executor, std::shared_ptr<HostDevice> device)
      : executor_(std::move(executor)), device_(std::move(device)) {}
  [[nodiscard]] std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) override {
    return executor_->prepare(std::move(plan));
  }
  void execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) override {
    device_->calls.push_back(prepared.plan().operation);
    device_->streams.insert(operands.stream);
    const bool puts =
        !prepared.plan().transfers.empty() && prepared.plan().transfers.front().kind == TransferKind::kPut;
    if (puts) device_->run_puts(prepared.plan());
    executor_->execute(prepared, operands, mode, timeline);
  }
  [[nodiscard]] std::int64_t workspace_bytes() const override { return executor_->workspace_bytes(); }
  [[nodiscard]] std::shared_ptr<plan::MoeDevice> make_moe_device() const override { return device_; }

 private:
  std::unique_ptr<Executor> executor_;
  std::shared_ptr<HostDevice> device_;
};

}  // namespace flashoverlap::test
