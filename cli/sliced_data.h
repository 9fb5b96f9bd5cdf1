#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashoverlap/operators.h"
#include "matrices.h"
#include "result_check.h"
#include "sliced_options.h"

/// The matrices of `flashoverlap run` for operators whose data travels in slices, and what must come out.
namespace flashoverlap::cli {

/// What each rank multiplies, once all has arrived.
std::vector<Inputs> make_sliced_inputs(const SlicedProblem& problem);

/// One rank's matrices.
class SlicedData {
 public:
  /// `inputs`: of all ranks. `op`: this rank's. All but `op` must outlive this.
  SlicedData(const SlicedProblem& problem, const std::vector<Inputs>& inputs, std::size_t rank,
             const GemmOperator& op);

  /// A and B as the rank has them before its first call by `method`; what arrives is unset.
  [[nodiscard]] const Matrix& a(Method method) const;
  [[nodiscard]] const Matrix& b(Method method) const;
  [[nodiscard]] std::int64_t lda() const;
  [[nodiscard]] std::int64_t ldb() const { return problem_.k; }
  [[nodiscard]] Matrix& out() { return out_; }
  [[nodiscard]] const Matrix& out() const { return out_; }

  /// A sample of the output's elements against fp64, with the tolerances of result_check.h. Returns what is
  /// wrong, or nothing.
  [[nodiscard]] std::string check(const Matrix& out, Method method, SumRounding sums,
                                  double& max_error) const;

 private:
  struct Expected {
    double value = 0;
    double tolerance = 0;
  };
  [[nodiscard]] Expected element(std::int64_t row, std::int64_t col, Method method, SumRounding sums) const;

  const SlicedProblem& problem_;
  const std::vector<Inputs>& inputs_;
  std::size_t rank_;
  Matrix out_;
  Matrix gathered_;  // of A or B, what this rank has
  Matrix sliced_;    // the same for the sliced baseline
  std::vector<std::int64_t> begins_;
  std::vector<std::int64_t> rows_;
  std::vector<std::int64_t> order_;
};

}  // namespace flashoverlap::cli
