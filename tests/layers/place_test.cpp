// Matrices at a place, and the values that layers are made of.
#include "layers/place.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "flashoverlap/in_process.h"
#include "layers/values.h"

namespace flashoverlap::layers {
namespace {

/// Calls `function` with the place of a world of one rank.
void at_host_place(DType dtype, const std::function<void(HostPlace&)>& function) {
  run_ranks(1, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context(communicator);
    HostPlace place(context, dtype);
    function(place);
  });
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

TEST(Matrices, ArePoisonedUntilTheyAreWritten) {
  for (const DType dtype : kTypes) {
    at_host_place(dtype, [](HostPlace& place) {
      Matrix matrix(place, 3, 2);
      for (const float value : matrix.read()) EXPECT_TRUE(std::isnan(value));
      matrix.write_rows(1, {1, 2, 3, 4});
      const Values values = matrix.read();
      EXPECT_TRUE(std::isnan(values[0]) && std::isnan(values[1]));
      EXPECT_EQ(Values(values.begin() + 2, values.end()), (Values{1, 2, 3, 4}));
      matrix.poison();
      for (const float value : matrix.read()) EXPECT_TRUE(std::isnan(value));
    });
  }
}

TEST(Matrices, RoundToTheirType) {
  const Values values{1.0F + 0x1p-20F, 1.0F + 0x1p-9F, 3.0F};
  at_host_place(DType::kFloat32,
                [&](HostPlace& place) { EXPECT_EQ(Matrix(place, 1, 3, values).read(), values); });
  at_host_place(DType::kFloat16, [&](HostPlace& place) {
    EXPECT_EQ(Matrix(place, 1, 3, values).read(), (Values{1.0F, 1.0F + 0x1p-9F, 3.0F}));
  });
  at_host_place(DType::kBFloat16, [&](HostPlace& place) {
    EXPECT_EQ(Matrix(place, 1, 3, values).read(), (Values{1.0F, 1.0F, 3.0F}));
  });
}

TEST(RandomValues, AreMadeOnceForAllWhoHaveThem) {
  std::vector<SharedValues> values(4);
  std::vector<std::thread> threads;
  for (SharedValues& mine : values)
    threads.emplace_back([&mine] { mine = random_weight(20, 30, DType::kBFloat16, 5, 6); });
  for (std::thread& thread : threads) thread.join();
  for (const SharedValues& mine : values) EXPECT_EQ(mine, values.front());
  EXPECT_NE(random_weight(20, 30, DType::kFloat16, 5, 6), values.front());
  EXPECT_NE(*random_weight(20, 30, DType::kBFloat16, 5, 7), *values.front());
  const Values before = *values.front();
  values.clear();
  EXPECT_EQ(*random_weight(20, 30, DType::kBFloat16, 5, 6), before);
}

TEST(RandomValues, AreNumbersOfTheirType) {
  for (const DType dtype : kTypes) {
    at_host_place(dtype, [dtype](HostPlace& place) {
      for (const SharedValues& values : {random_weight(7, 9, dtype, 1, 2), random_tokens(7, 9, dtype, 1, 2)})
        EXPECT_EQ(Matrix(place, 7, 9, *values).read(), *values);
    });
  }
}

TEST(Pieces, OfAMatrix) {
  const Values matrix{0, 1, 2, 10, 11, 12};  // [2, 3]
  EXPECT_EQ(rows_of(matrix, 3, 1, 1), (Values{10, 11, 12}));
  EXPECT_EQ(columns_of(matrix, 3, 1, 2), (Values{1, 2, 11, 12}));
  EXPECT_EQ(transposed(matrix, 2, 3), (Values{0, 10, 1, 11, 2, 12}));
  const SharedValues large = random_weight(70, 50, DType::kFloat32, 1, 1);
  EXPECT_EQ(transposed(transposed(*large, 70, 50), 50, 70), *large);
}

TEST(SampledRows, AreFewWhereARowIsMuchWork) {
  EXPECT_EQ(sample_rows(0, 1).size(), 0U);
  EXPECT_EQ(sample_rows(3, 1), (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(sample_rows(2000, 1).size(), 20U);
  EXPECT_LE(sample_rows(2048, 2LL * 4096 * 14336).size(), 9U);
  EXPECT_EQ(sample_rows(1024, 2LL * 32 * 4096 * 4096).size(), 2U);
}

}  // namespace
}  // namespace flashoverlap::layers
