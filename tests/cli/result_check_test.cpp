#include "result_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support/seed.h"

namespace flashoverlap::cli {
namespace {

/// A problem with its inputs and the results that a faultless implementation in float32 gives, computed row
/// by row here.
struct Case {
  ProblemOptions options;
  Routing routing;
  std::vector<Inputs> inputs;

  explicit Case(const ProblemOptions& given) : options(given), routing(make_routing(given)) {
    for (int rank = 0; rank < options.ranks; ++rank) inputs.push_back(make_inputs(options, rank));
  }

  [[nodiscard]] std::vector<float> product_row(std::size_t rank, std::int64_t row) const {
    std::vector<float> a(static_cast<std::size_t>(options.k));
    std::vector<float> b(a.size());
    inputs[rank].a.read_row(row, a.data());
    std::vector<float> result;
    for (std::int64_t col = 0; col < options.n; ++col) {
      inputs[rank].b.read_row(col, b.data());
      float sum = 0;
      for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
      result.push_back(sum);
    }
    return rounded(result);
  }

  /// What travels has the storage type.
  [[nodiscard]] std::vector<float> rounded(const std::vector<float>& values) const {
    Matrix row(1, options.n, options.dtype);
    row.write_row(0, values.data());
    std::vector<float> result(values.size());
    row.read_row(0, result.data());
    return result;
  }

  /// `rounds_every_sum`: as a ring does it that adds in the storage type.
  [[nodiscard]] Matrix all_reduce(bool rounds_every_sum = false) const {
    Matrix out(options.m, options.n, options.dtype);
    for (std::int64_t row = 0; row < options.m; ++row) {
      std::vector<float> sum(static_cast<std::size_t>(options.n));
      for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
        const std::vector<float> partial = product_row(rank, row);
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += partial[i];
        if (rounds_every_sum) sum = rounded(sum);
      }
      out.write_row(row, sum.data());
    }
    return out;
  }

  [[nodiscard]] Matrix all_to_all(std::int32_t destination) const {
    std::vector<std::vector<float>> rows;
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      for (std::int64_t row = 0; row < options.m; ++row) {
        if (routing.destinations[rank][static_cast<std::size_t>(row)] == destination) {
          rows.push_back(product_row(rank, row));
        }
      }
    }
    Matrix out(std::ssize(rows), options.n, options.dtype);
    for (std::int64_t row = 0; row < out.rows(); ++row)
      out.write_row(row, rows[static_cast<std::size_t>(row)].data());
    return out;
  }

  [[nodiscard]] ResultCheck check(SumRounding sums = SumRounding::kOnce) const {
    return {options, routing, inputs, 16, sums};
  }
};

float element(const Matrix& matrix, std::int64_t row, std::int64_t col) {
  std::vector<float> values(static_cast<std::size_t>(matrix.cols()));
  matrix.read_row(row, values.data());
  return values[static_cast<std::size_t>(col)];
}

void set_element(Matrix& matrix, std::int64_t row, std::int64_t col, float value) {
  std::vector<float> values(static_cast<std::size_t>(matrix.cols()));
  matrix.read_row(row, values.data());
  values[static_cast<std::size_t>(col)] = value;
  matrix.write_row(row, values.data());
}

class ResultCheckTest : public test::SeededTest {
 protected:
  ProblemOptions random_options(Op op) {
    ProblemOptions options;
    options.op = op;
    options.m = pick(1, 40);
    options.n = pick(1, 40);
    options.k = pick(0, 300);
    options.ranks = pick(1, 5);
    options.dtype = static_cast<DType>(pick(0, 2));
    options.skew = static_cast<double>(pick(0, 10)) / 10;
    options.seed = rng_();
    return options;
  }
};

TEST_F(ResultCheckTest, AcceptsRightResults) {
  for (int round = 0; round < 40; ++round) {
    const Case sum(random_options(Op::kGemmAllReduce));
    const CheckResult result = sum.check().check(0, sum.all_reduce());
    EXPECT_EQ(result.wrong, "");
    EXPECT_LE(result.max_error, result.tolerance);
    EXPECT_EQ(result.elements, sum.options.m * sum.options.n);

    const Case exchange(random_options(Op::kGemmAllToAll));
    const auto rank = static_cast<std::int32_t>(pick(0, exchange.options.ranks - 1));
    EXPECT_EQ(exchange.check().check(rank, exchange.all_to_all(rank)).wrong, "");
  }
}

// NCCL adds bf16 in bf16: with eight ranks that is beyond what one rounding explains.
TEST_F(ResultCheckTest, AcceptsSumsThatAreRoundedOnTheWay) {
  int beyond_one_rounding = 0;
  for (int round = 0; round < 20; ++round) {
    ProblemOptions options = random_options(Op::kGemmAllReduce);
    options.dtype = DType::kBFloat16;
    options.ranks = 8;
    options.k = pick(100, 300);
    const Case sum(options);
    const Matrix out = sum.all_reduce(true);
    EXPECT_EQ(sum.check(SumRounding::kEverySum).check(0, out).wrong, "");
    beyond_one_rounding += sum.check().check(0, out).correct() ? 0 : 1;
  }
  EXPECT_GT(beyond_one_rounding, 0);
}

TEST_F(ResultCheckTest, FindsOneWrongElement) {
  for (int round = 0; round < 40; ++round) {
    const Case sum(random_options(Op::kGemmAllReduce));
    const ResultCheck check = sum.check();
    Matrix out = sum.all_reduce();
    const std::int64_t row = pick(0, out.rows() - 1);
    const std::int64_t col = pick(0, out.cols() - 1);
    // Off by a quarter of the product's typical size, at least 1.
    const float off = 1.0F + std::sqrt(static_cast<float>(sum.options.k * sum.options.ranks)) / 4;
    set_element(out, row, col, element(out, row, col) + off);
    const std::string place = "element [" + std::to_string(row) + ", " + std::to_string(col) + "] is";
    EXPECT_NE(check.check(0, out).wrong.find(place), std::string::npos) << check.check(0, out).wrong;
  }
}

TEST_F(ResultCheckTest, FindsWhatWasNeverWritten) {
  const Case sum(random_options(Op::kGemmAllReduce));
  Matrix out = sum.all_reduce();
  set_element(out, out.rows() - 1, out.cols() - 1, std::nanf(""));
  const CheckResult result = sum.check().check(0, out);
  EXPECT_NE(result.wrong.find("is nan"), std::string::npos) << result.wrong;
  EXPECT_TRUE(std::isnan(result.max_error));
}

TEST_F(ResultCheckTest, FindsRowsInWrongPlaces) {
  ProblemOptions options;
  options.m = 8;
  options.n = 24;
  options.k = 64;
  const Case sum(options);
  Matrix out = sum.all_reduce();
  std::vector<float> first(24);
  std::vector<float> second(24);
  out.read_row(2, first.data());
  out.read_row(5, second.data());
  out.write_row(2, second.data());
  out.write_row(5, first.data());
  EXPECT_FALSE(sum.check().check(0, out).correct());
}

TEST_F(ResultCheckTest, FindsAMissingRank) {
  ProblemOptions options;
  options.m = options.n = 16;
  options.k = 64;
  options.ranks = 3;
  const Case all(options);
  Case two(options);
  two.inputs.pop_back();
  EXPECT_FALSE(all.check().check(0, two.all_reduce()).correct());
}

// Too large for every element to be computed one by one: the projection has to find it.
TEST_F(ResultCheckTest, ProjectionFindsOneWrongElementOfMany) {
  ProblemOptions options;
  options.m = 400;
  options.n = 500;
  options.k = 16;
  options.ranks = 4;
  const Case sum(options);
  const ResultCheck check = sum.check();
  Matrix out = sum.all_reduce();
  const CheckResult right = check.check(1, out);
  EXPECT_EQ(right.wrong, "");
  ASSERT_LT(right.elements, out.rows() * out.cols());
  int found = 0;
  for (int round = 0; round < 20; ++round) {
    Matrix wrong = out;
    const std::int64_t row = pick(0, out.rows() - 1);
    const std::int64_t col = pick(0, out.cols() - 1);
    set_element(wrong, row, col, element(wrong, row, col) + 0.05F);
    // The element may be among the few that are computed one by one, too, and is named as such then.
    const std::string said = check.check(1, wrong).wrong;
    const bool names_row = said.find("row " + std::to_string(row)) != std::string::npos ||
                           said.find("element [" + std::to_string(row) + ",") != std::string::npos;
    found += names_row ? 1 : 0;
  }
  EXPECT_EQ(found, 20);
}

TEST_F(ResultCheckTest, NamesAWrongShape) {
  const Case sum(random_options(Op::kGemmAllReduce));
  const std::string wrong =
      sum.check().check(0, Matrix(sum.options.m + 1, sum.options.n, sum.options.dtype)).wrong;
  EXPECT_EQ(wrong, "rank 0: the output is " + std::to_string(sum.options.m + 1) + "x" +
                       std::to_string(sum.options.n) + "; expected " + std::to_string(sum.options.m) + "x" +
                       std::to_string(sum.options.n));
}

TEST(CheckResultMerge, KeepsWhatIsClosestToItsTolerance) {
  CheckResult result;
  result.merge({0.1, 1.0, 1, {}});
  result.merge({0.05, 0.1, 1, {}});
  EXPECT_EQ(result.max_error, 0.05);
  EXPECT_EQ(result.tolerance, 0.1);
  result.merge({0.2, 1.0, 1, {}});
  EXPECT_EQ(result.max_error, 0.05);
  result.merge({std::nan(""), 1.0, 1, "first"});
  result.merge({2, 1.0, 1, "second"});
  EXPECT_TRUE(std::isnan(result.max_error));
  EXPECT_EQ(result.elements, 5);
  EXPECT_EQ(result.wrong, "first");
}

TEST(Routing, SplitsRowsAsAsked) {
  ProblemOptions options;
  options.op = Op::kGemmAllToAll;
  options.m = 10;
  options.ranks = 3;
  const auto counts = [&] {
    const Routing routing = make_routing(options);
    std::vector<std::int64_t> result;
    for (std::int32_t rank = 0; rank < 3; ++rank) result.push_back(routing.rows(1, rank));
    return result;
  };
  EXPECT_EQ(counts(), (std::vector<std::int64_t>{4, 3, 3}));
  options.skew = 1;
  EXPECT_EQ(counts(), (std::vector<std::int64_t>{10, 0, 0}));
  options.skew = 0.4;
  EXPECT_EQ(counts(), (std::vector<std::int64_t>{6, 2, 2}));
  options.rows_to_rank = {0, 9, 1};
  EXPECT_EQ(counts(), options.rows_to_rank);
}

}  // namespace
}  // namespace flashoverlap::cli
