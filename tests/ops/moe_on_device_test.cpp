// The layer whose rows lie on a device, with a device of host memory and the plainest passes: what a GPU does
// is tested in tests/gpu.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <set>

#include "core/half.h"
#include "cpu/epilogue.h"
#include "flashoverlap/cpu_executor.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/moe_layer.h"
#include "ops/moe_reference.h"
#include "plan/moe_device.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::test {
namespace {

/// Every call is noted, and memory that it does not know is refused.
class HostDevice final : public plan::MoeDevice {
 public:
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

  void gather(const void* x, std::int64_t ldx, std::int64_t cols, DType dtype, void* to,
              void* stream) override {
    note("gather", stream);
    const auto bytes = at(cols * size_of(dtype));
    for (std::size_t i = 0; i < tables_.token.size(); ++i) {
      auto* const row = static_cast<std::byte*>(to) + tables_.place[i] * cols * size_of(dtype);
      if (tables_.token[i] < 0) {
        std::fill_n(row, bytes, std::byte{0});
      } else {
        std::copy_n(static_cast<const std::byte*>(x) + tables_.token[i] * ldx * size_of(dtype), bytes, row);
      }
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
  void reduce(const void* results, std::int64_t cols, DType dtype, void* out, std::int64_t ldo,
              void* stream) override {
    note("reduce", stream);
    std::vector<float> values(at(cols));
    for (std::int64_t token = 0; token < tables_.tokens; ++token) {
      std::vector<float> sums(at(cols), 0.0F);
      for (std::int64_t i = token * tables_.top_k; i < (token + 1) * tables_.top_k; ++i) {
        const std::int64_t row = tables_.result[at(i)];
        if (row < 0) continue;
        core::to_float(static_cast<const std::byte*>(results) + row * cols * size_of(dtype), dtype,
                       values.data(), cols);
        for (std::int64_t c = 0; c < cols; ++c) sums[at(c)] += tables_.weight[at(i)] * values[at(c)];
      }
      core::from_float(sums.data(), dtype, static_cast<std::byte*>(out) + token * ldo * size_of(dtype), cols);
    }
  }
  void end(void* stream) override { note("end", stream); }

  std::set<const void*> refused;
  std::vector<std::string> calls;
  std::set<void*> streams;

 private:
  void note(const char* call, void* stream) {
    if (calls.empty() || calls.back() != call) calls.emplace_back(call);
    streams.insert(stream);
  }

  std::map<Buffer, std::vector<std::byte>> buffers_;
  plan::MoeRowTables tables_;
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
    executor_->execute(prepared, operands, mode, timeline);
  }
  [[nodiscard]] std::int64_t workspace_bytes() const override { return executor_->workspace_bytes(); }
  [[nodiscard]] std::shared_ptr<plan::MoeDevice> make_moe_device() const override { return device_; }

 private:
  std::unique_ptr<Executor> executor_;
  std::shared_ptr<HostDevice> device_;
};

/// One rank whose rows lie on a device.
struct DeviceRank {
  std::shared_ptr<HostDevice> device = std::make_shared<HostDevice>();
  Context context;
  explicit DeviceRank(const std::shared_ptr<Communicator>& communicator)
      : context(communicator,
                std::make_unique<DeviceExecutor>(
                    make_cpu_executor(communicator, {.num_threads = 2, .poison_workspace = true}), device)) {}
};

class MoeOnDevice : public SeededTest {
 protected:
  MoeLayerOptions random_options() {
    MoeLayerOptions options;
    options.num_experts = pick(1, 7);
    options.hidden = pick(1, 40);
    options.intermediate = pick(1, 24);
    options.gated = pick(0, 1) == 0;
    options.activation = static_cast<Activation>(pick(0, 3));
    options.dtype = pick(0, 1) == 0 ? DType::kBFloat16 : DType::kFloat16;
    options.tile_m = pick(1, 9);
    options.tile_n = pick(1, 20);
    options.transport = pick(0, 1) == 0 ? MoeTransport::kPut : MoeTransport::kCollective;
    if (options.transport == MoeTransport::kPut && pick(0, 1) == 0) {
      options.padding = MoePadding::kPaper;
      options.order = MoeOrder::kExpertMajor;
    }
    options.collective_groups = pick(1, 4);
    options.poison_workspace = true;
    return options;
  }
  MoeRouting random_routing(const MoeLayerOptions& options, int rank, int world, std::int32_t top_k) {
    const std::int64_t tokens = pick(0, 4) == 0 ? 0 : pick(1, 25);
    MoeRouting routing = make_routing(static_cast<RoutingKind>(pick(0, 2)), rank, world, tokens,
                                      options.num_experts, top_k, 7);
    for (std::int32_t& expert : routing.experts) {
      if (pick(0, 5) == 0) expert = -1;
    }
    return routing;
  }
};

// The plans are the same and so are the passes, so the bits are.
TEST_F(MoeOnDevice, GivesTheBitsOfTheHost) {
  for (int round = 0; round < 40; ++round) {
    const int world = static_cast<int>(pick(1, 5));
    const MoeLayerOptions options = random_options();
    const MoeModel model = random_model(rng_, options);
    const auto top_k = static_cast<std::int32_t>(pick(1, std::min<std::int64_t>(3, options.num_experts)));
    std::vector<MoeRouting> routings;
    std::vector<Values> inputs;
    for (int r = 0; r < world; ++r) {
      routings.push_back(random_routing(options, r, world, top_k));
      inputs.push_back(random_values(rng_, routings.back().tokens * options.hidden, options.dtype, 1));
    }
    run_ranks(world, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      const auto rank = static_cast<std::size_t>(communicator->rank());
      const std::int64_t h = options.hidden;
      Values expected(routings[rank].tokens * h, options.dtype);
      {
        Context context(communicator, {.num_threads = 2, .poison_workspace = true});
        MoeLayer layer(context, options);
        layer.forward(inputs[rank].bytes.data(), h, routings[rank], weights_of(model, layer),
                      expected.bytes.data(), h);
      }
      DeviceRank on(communicator);
      MoeLayer layer(on.context, options);
      int stream = 0;
      for (const Method method : {Method::kOverlap, Method::kSerial, Method::kOverlap}) {
        if (method == Method::kSerial && options.padding != MoePadding::kRagged) continue;  // other tiles
        Values out(routings[rank].tokens * h, options.dtype);
        out.poison();
        on.device->calls.clear();
        const MoeReport report =
            layer.forward(inputs[rank].bytes.data(), h, routings[rank], weights_of(model, layer),
                          out.bytes.data(), h, method, nullptr, &stream);
        EXPECT_EQ(out.bytes, expected.bytes) << "rank " << rank << " of " << world;
        EXPECT_EQ(report.workspace_bytes, on.device->reserved_bytes());
        EXPECT_EQ(fmt::format("{}", fmt::join(on.device->calls, " ")),
                  "poison gather moe-dispatch activate moe-combine reduce end");
      }
      EXPECT_EQ(on.device->streams, std::set<void*>{&stream}) << "all in the caller's stream";
    });
    if (HasFailure()) return;
  }
}

TEST_F(MoeOnDevice, RefusesWhatItCannotDo) {
  run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    DeviceRank on(communicator);
    MoeLayerOptions good;
    good.hidden = good.intermediate = 8;
    good.num_experts = 2;
    good.dtype = DType::kBFloat16;
    MoeLayerOptions options = good;
    options.dtype = DType::kFloat32;
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "bf16 and f16, not f32",
                              MoeLayer(on.context, options));
    options = good;
    options.adapt = true;
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "adapt", MoeLayer(on.context, options));
    options = good;
    options.overlap_if = MoeOverlapIf::kMeasured;
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "overlap_if is 'measured'; on GPUs 'always'",
                              MoeLayer(on.context, options));

    MoeLayer layer(on.context, good);
    const MoeRouting routing = make_routing(RoutingKind::kBalanced, communicator->rank(), 2, 5, 2, 1, 1);
    const std::vector<std::uint16_t> x(5 * 8), up(16 * 8), down(8 * 8);
    std::vector<std::uint16_t> out(5 * 8, 0xFFFF);
    const MoeWeights weights{up.data(), down.data()};
    on.device->refused = {x.data()};
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "x at",
                              layer.forward(x.data(), 8, routing, weights, out.data(), 8));
    on.device->refused = {down.data()};
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "down weights at",
                              layer.forward(x.data(), 8, routing, weights, out.data(), 8));
    EXPECT_EQ(out, std::vector<std::uint16_t>(5 * 8, 0xFFFF)) << "written in spite of the error";
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "backward of a layer of experts is on CPUs only",
                              layer.backward(x.data(), 8, weights, {}));
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "measure_parts of a layer of experts is on CPUs only",
                              layer.measure_parts(weights));
  });
}

}  // namespace
}  // namespace flashoverlap::test
