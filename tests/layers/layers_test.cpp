// Whole layers on CPUs, in every element type, and what their checks notice.
#include <gtest/gtest.h>

#include <utility>

#include "flashoverlap/cpu_executor.h"
#include "flashoverlap/in_process.h"
#include "support/layer_case.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

using layers::HostPlace;
using layers::Layer;
using layers::Matrix;
using layers::Place;
using layers::Values;

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

class Layers : public SeededTest {};

std::string text_of(const LayerCase& call, DType dtype) {
  return call.text + " " + std::string(name_of(dtype));
}

TEST_F(Layers, AreTheWholeLayerByEveryMethod) {
  for (int world = 1; world <= 4; ++world) {
    LayerShapes shapes(rng_(), world);
    for (const LayerKind kind : kLayerKinds) {
      for (const DType dtype : kTypes) {
        const LayerCase call = shapes.pick_case(kind);
        run_ranks(world, {}, [&](const std::shared_ptr<Communicator>& communicator) {
          Context context(communicator, {.num_threads = 2});
          HostPlace place(context, dtype);
          EXPECT_EQ(fault_of_any_method(*call.make(place)), "") << text_of(call, dtype);
        });
      }
    }
  }
}

TEST_F(Layers, HaveTheSameBitsSeriallyAndOverlapped) {
  LayerShapes shapes(rng_(), 3);
  for (const LayerKind kind : kLayerKinds) {
    for (const DType dtype : kTypes) {
      const LayerCase call = shapes.pick_case(kind);
      run_ranks(3, {}, [&](const std::shared_ptr<Communicator>& communicator) {
        Context context(communicator, {.num_threads = 1});
        HostPlace place(context, dtype);
        const std::unique_ptr<Layer> layer = call.make(place);
        layer->run(Method::kSerial);
        const Values serial = layer->output();
        layer->poison();
        layer->run();
        EXPECT_EQ(layer->output(), serial) << text_of(call, dtype);
      });
    }
  }
}

/// A CPU executor that changes calls.
class ChangedExecutor final : public Executor {
 public:
  using Change = std::function<void(Operands&)>;
  ChangedExecutor(const std::shared_ptr<Communicator>& communicator, bool makes_rows, Change change)
      : cpu_(make_cpu_executor(communicator)), makes_rows_(makes_rows), change_(std::move(change)) {}

  [[nodiscard]] std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) override {
    return cpu_->prepare(std::move(plan));
  }
  void execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) override {
    Operands changed = operands;
    change_(changed);
    cpu_->execute(prepared, changed, mode, timeline);
  }
  [[nodiscard]] bool makes_rows() const override { return makes_rows_; }
  [[nodiscard]] std::int64_t workspace_bytes() const override { return cpu_->workspace_bytes(); }

 private:
  std::unique_ptr<Executor> cpu_;
  bool makes_rows_;
  Change change_;
};

// Then attention of all queries comes before the output projection.
TEST_F(Layers, AttentionNeedsNoExecutorThatMakesRows) {
  LayerShapes shapes(rng_(), 2);
  for (const DType dtype : kTypes) {
    const LayerCase call = shapes.pick_case(LayerKind::kAttentionTpsp);
    run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      const auto no_rows = [](const Operands& operands) { EXPECT_FALSE(operands.make_rows); };
      Context context(communicator, std::make_unique<ChangedExecutor>(communicator, false, no_rows));
      HostPlace place(context, dtype);
      EXPECT_EQ(fault_of_any_method(*call.make(place)), "") << text_of(call, dtype);
    });
  }
}

/// An error of each rank that the checks must not let pass.
void expect_noticed(const Layer& layer, DType dtype) {
  EXPECT_GT(layer.error(), layer.largest_error()) << name_of(dtype);
}

TEST_F(Layers, NoticeAMissingActivation) {
  for (const DType dtype : kTypes) {
    run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      const auto change = [](Operands& operands) { operands.epilogue.activation = Activation::kNone; };
      Context context(communicator, std::make_unique<ChangedExecutor>(communicator, true, change));
      HostPlace place(context, dtype);
      const auto layer = layers::make_mlp_tpsp(place, {.tokens = 60, .hidden = 64, .inner = 128});
      layer->run();
      expect_noticed(*layer, dtype);
    });
  }
}

/// Takes all tokens for equally important.
class UniformAttention final : public layers::Attention {
 public:
  UniformAttention(const layers::AttentionShape& own, const Matrix& qkv, const Matrix& out)
      : own_(own), qkv_(qkv), out_(out) {}

  void run(std::int64_t first, std::int64_t count) override {
    const Values qkv = qkv_.read();
    Values mean(static_cast<std::size_t>(out_.cols()));
    for (std::int64_t col = 0; col < out_.cols(); ++col) {
      const std::int64_t v = (3 * (col / own_.head_size) + 2) * own_.head_size + col % own_.head_size;
      float sum = 0;
      for (std::int64_t t = 0; t < own_.tokens; ++t)
        sum += qkv[static_cast<std::size_t>(t * qkv_.cols() + v)];
      mean[static_cast<std::size_t>(col)] = sum / static_cast<float>(own_.tokens);
    }
    for (std::int64_t i = first; i < first + count; ++i) out_.write_rows(i, mean);
  }

 private:
  layers::AttentionShape own_;
  const Matrix& qkv_;
  const Matrix& out_;
};

class UniformPlace final : public HostPlace {
 public:
  using HostPlace::HostPlace;
  [[nodiscard]] std::unique_ptr<layers::Attention> make_attention(const layers::AttentionShape& own,
                                                                  const Matrix& qkv,
                                                                  const Matrix& out) override {
    return std::make_unique<UniformAttention>(own, qkv, out);
  }
};

TEST_F(Layers, NoticeAttentionWithoutASoftmax) {
  for (const DType dtype : kTypes) {
    run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      Context context(communicator);
      UniformPlace place(context, dtype);
      const layers::AttentionShape shape{.tokens = 64, .heads = 4, .head_size = 16};
      const auto tpsp = layers::make_attention_tpsp(place, shape);
      tpsp->run();
      expect_noticed(*tpsp, dtype);
      const auto up = layers::make_attention_up(place, shape);
      up->run();
      expect_noticed(*up, dtype);
    });
  }
}

}  // namespace
}  // namespace flashoverlap::test
