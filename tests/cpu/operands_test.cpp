// Operands that do not hold are refused before anything is written, each with its reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "flashoverlap/cpu_executor.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/plan_builders.h"
#include "support/known_faults.h"
#include "support/ops_call.h"

namespace flashoverlap::test {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kM = 8;
constexpr std::int64_t kN = 6;
constexpr std::int64_t kK = 5;

PlanOptions options(DType dtype = DType::kFloat32) {
  PlanOptions options;
  options.dtype = dtype;
  options.m = kM;
  options.n = kN;
  options.k = kK;
  options.tile_m = options.tile_n = 4;
  return options;
}

class OperandChecks : public ::testing::Test {
 protected:
  OperandChecks()
      : executor_(make_cpu_executor(make_in_process_communicators(1)[0])),
        prepared_(executor_->prepare(plan_all_reduce(options()))) {}

  Operands good() { return operands_of(a_, b_, out_); }

  void expect_refused(const std::function<void(Operands&)>& change, const std::string& reason) {
    Operands operands = good();
    change(operands);
    try {
      executor_->execute(*prepared_, operands, Mode::kRun, nullptr);
      ADD_FAILURE() << "accepted, instead of: " << reason;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadArgument) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(reason));
    }
    EXPECT_TRUE(out_.untouched());
  }

  void expect_accepted(const Operands& operands) {
    EXPECT_NO_THROW(executor_->execute(*prepared_, operands, Mode::kRun, nullptr));
  }

  std::unique_ptr<Executor> executor_;
  std::unique_ptr<PreparedPlan> prepared_;
  Matrix a_ = known_matrix_a(0, kM, kK);
  Matrix b_ = known_matrix_b(0, kN, kK);
  Matrix out_{kM, kN, DType::kFloat32};
  Matrix residual_{kM, kN, DType::kFloat32};
  Matrix vector_{1, kN, DType::kFloat32};
};

TEST_F(OperandChecks, MissingMatrices) {
  expect_refused([](Operands& o) { o.a = nullptr; },
                 "a is null; a [8, 5] matrix is expected (gemm-all-reduce m=8 n=6 k=5 f32)");
  expect_refused([](Operands& o) { o.b = nullptr; }, "b is null; a [6, 5] matrix is expected");
  expect_refused([](Operands& o) { o.out = nullptr; }, "out is null; a [8, 6] matrix is expected");
}

TEST_F(OperandChecks, LeadingDimensions) {
  expect_refused([](Operands& o) { o.lda = 4; }, "lda is 4; it must be at least the 5 columns of a");
  expect_refused([](Operands& o) { o.lda = 0; }, "lda is 0; it must be at least the 5 columns of a");
  expect_refused([](Operands& o) { o.ldb = -5; }, "ldb is -5; it must be at least the 5 columns of b");
  expect_refused([](Operands& o) { o.ldo = 5; }, "ldo is 5; it must be at least the 6 columns of out");
  expect_refused(
      [&](Operands& o) {
        o.epilogue.residual = residual_.data();
        o.epilogue.residual_ld = 3;
      },
      "residual_ld is 3; it must be at least the 6 columns of residual");
  expect_refused([&](Operands& o) { o.epilogue.residual_out = residual_.data(); },
                 "residual_out_ld is 0; it must be at least the 6 columns of residual_out");
}

TEST_F(OperandChecks, Misaligned) {
  const auto shifted = [](const void* data) {
    return static_cast<const void*>(static_cast<const std::byte*>(data) + 2);
  };
  expect_refused([&](Operands& o) { o.a = shifted(o.a); }, "f32 elements must be aligned to 4 bytes");
  expect_refused([&](Operands& o) { o.out = const_cast<void*>(shifted(o.out)); }, "out is at address");
  expect_refused([&](Operands& o) { o.epilogue.bias = shifted(vector_.data()); }, "bias is at address");
}

TEST_F(OperandChecks, OverlappingMatrices) {
  expect_refused([&](Operands& o) { o.a = out_.data(); }, "overlaps a [8, 5]");
  expect_refused([&](Operands& o) { o.b = out_.data() + 4 * 20; }, "overlaps b [6, 5]");
  expect_refused([&](Operands& o) { o.epilogue.bias = out_.data() + 4 * 42; }, "overlaps bias [1, 6]");
  expect_refused([&](Operands& o) { o.epilogue.rms_norm_weight = out_.data(); },
                 "overlaps rms_norm_weight [1, 6]");
  expect_refused(
      [&](Operands& o) {
        o.epilogue.residual = out_.data();
        o.epilogue.residual_ld = kN;
      },
      "out [8, 6]");
  expect_refused(
      [&](Operands& o) {
        o.epilogue.residual_out = a_.data();
        o.epilogue.residual_out_ld = kN;
      },
      "residual_out [8, 6]");
  Matrix wide(kM + 1, kN, DType::kFloat32);
  expect_refused(
      [&](Operands& o) {
        o.epilogue.residual = wide.data();
        o.epilogue.residual_out =
            wide.data() + 4 * kN;  // a row later: rows would be read after they were written
        o.epilogue.residual_ld = o.epilogue.residual_out_ld = kN;
      },
      "overlaps residual [8, 6]");
}

TEST_F(OperandChecks, BlocksOfOneMatrixDoNotOverlap) {
  Matrix all(kM, kN + kK + 1, DType::kFloat32);
  for (std::int64_t i = 0; i < kM; ++i) {
    for (std::int64_t p = 0; p < kK; ++p) all.set(i, kN + p, a_.at(i, p));
  }
  Operands operands = good();
  operands.out = all.data();
  operands.a = all.data() + 4 * kN;
  operands.lda = operands.ldo = all.ld();
  expect_accepted(operands);
  expect_accepted(good());
  for (std::int64_t i = 0; i < kM; ++i) {
    for (std::int64_t j = 0; j < kN; ++j) EXPECT_EQ(all.at(i, j), out_.at(i, j));
  }
  // One column further they share one.
  operands.a = all.data() + 4 * (kN - 1);
  EXPECT_THROW(executor_->execute(*prepared_, operands, Mode::kRun, nullptr), Error);
}

TEST_F(OperandChecks, ResidualInPlaceIsFine) {
  residual_.fill([](auto i, auto j) { return i - j; });
  const Matrix before = residual_;
  Operands operands = good();
  operands.epilogue.residual = operands.epilogue.residual_out = residual_.data();
  operands.epilogue.residual_ld = operands.epilogue.residual_out_ld = kN;
  expect_accepted(operands);
  Matrix plain(kM, kN, DType::kFloat32);
  expect_accepted(operands_of(a_, b_, plain));
  for (std::int64_t i = 0; i < kM; ++i) {
    for (std::int64_t j = 0; j < kN; ++j) {
      EXPECT_EQ(out_.at(i, j), plain.at(i, j) + before.at(i, j));
      EXPECT_EQ(residual_.at(i, j), out_.at(i, j));
    }
  }
}

TEST_F(OperandChecks, NothingIsNeededForEmptySizes) {
  const auto run = [&](std::int64_t m, std::int64_t n, std::int64_t k, const Operands& operands) {
    PlanOptions empty = options();
    empty.m = m;
    empty.n = n;
    empty.k = k;
    const auto prepared = executor_->prepare(plan_all_reduce(empty));
    EXPECT_NO_THROW(executor_->execute(*prepared, operands, Mode::kRun, nullptr))
        << m << " " << n << " " << k;
  };
  run(0, kN, kK, Operands{});
  run(kM, 0, kK, Operands{});
  Operands only_out;
  only_out.out = out_.data();
  only_out.ldo = kN;
  run(kM, kN, 0, only_out);
  for (std::int64_t i = 0; i < kM; ++i) {
    for (std::int64_t j = 0; j < kN; ++j) EXPECT_EQ(out_.at(i, j), 0);
  }
}

}  // namespace
}  // namespace flashoverlap::test
