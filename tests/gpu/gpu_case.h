// One call of an operator on every rank, with its exact result.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashoverlap/operators.h"
#include "gpu_matrix.h"
#include "gpu_ranks.h"

namespace flashoverlap::gpu_test {

enum class Op { kAllReduce, kReduceScatter, kAllToAll };
const char* name_of(Op op);

struct Case {
  Op op = Op::kAllReduce;
  GemmOptions gemm;  ///< All-to-all: m is taken from `destinations`.
  RowOwnership rows = RowOwnership::kContiguous;
  std::vector<std::vector<std::int32_t>> destinations;  ///< All-to-all: per rank, per row.
  std::int64_t seed = 0;                                ///< Rank r's data has seed + r.
  std::int64_t padding = 0;                             ///< Elements between the rows of every matrix.
  bool with_epilogue = false;                           ///< Bias, ReLU, residual and residual_out.
  /// Leave the partition to the operator where `gemm` has none. Otherwise it is default_partition, so that
  /// the tests' small shapes have several groups, which the operator would not cut them into.
  bool leaves_partition_open = false;

  [[nodiscard]] std::int64_t m_of(int rank) const;
  [[nodiscard]] std::string text() const;
};

/// What each rank's output must be.
struct Expected {
  std::vector<std::vector<std::int32_t>> out;  ///< Per rank.
  std::vector<std::vector<std::int32_t>>
      residual_out;  ///< Per rank; the same as `out` where there is no norm.
};
/// By plain integer loops. Fails the test when a value is beyond what `dtype` holds exactly. `tile_m`: of the
/// plan.
Expected expected_of(const Case& call, int world_size, std::int64_t tile_m);

/// One rank's operator with its matrices.
class RankCall {
 public:
  RankCall(Rank& rank, const Case& call);
  /// Poisons the output, runs, waits. `expected`: from expected_of.
  void run_and_check(const Expected& expected, Method method);
  /// Puts one call into the stream; waits for nothing.
  void enqueue(Method method);
  void check(const Expected& expected, const std::string& what);
  void poison();
  /// New inputs: A and B of another seed.
  void refill(std::int64_t seed);
  [[nodiscard]] GemmOperator& op() { return *op_; }
  [[nodiscard]] Operands& operands() { return operands_; }
  [[nodiscard]] const DeviceMatrix& out() const { return out_; }

 private:
  Rank& rank_;
  Case call_;
  std::unique_ptr<GemmOperator> op_;
  DeviceMatrix a_, b_;
  DeviceMatrix out_, bias_, residual_, residual_out_;
  Operands operands_;
};

/// Bias and residual of a case; row is the output's.
std::int32_t bias_value(std::int64_t col);
std::int32_t residual_value(int rank, std::int64_t row, std::int64_t col);

/// Runs the case on the group both ways, and checks every rank.
void run_case(Group& group, const Case& call);

}  // namespace flashoverlap::gpu_test
