#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "matrices.h"
#include "problem_options.h"

/// Checks what the operators computed against an fp64 reference that shares no code with them.
///
/// Two checks, both on every rank:
///  - a seeded sample of elements (all of them when that is cheap) is computed afresh in fp64;
///  - every element takes part in a random projection (Freivalds 1977): with v of random signs, each row of
///  the output times
///    v must be A_r[row] · (B_r^T v), summed over the ranks r that the row comes from. That costs O(mn + mk +
///    nk) instead of O(mnk), and finds a single wrong element, a row in a wrong place or a rank that is
///    missing anywhere in the output.
///
/// Tolerances follow from k, the type and the matrices' distribution, which is uniform in [-1, 1). A sum of j
/// products has standard deviation sqrt(j)/3, so adding up k products in float32 gives an error of standard
/// deviation 0.14 k u with u = 2^-24; 2 (k + 1) u is allowed for each rank, some 15 of them. A 16-bit type
/// with unit round-off v adds v |p_r| for each rank's partial result p_r, which travels in that type, and v
/// |sum| for the result; where every sum on the way is rounded, v times the sum of all |p_r| for each of the
/// W - 2 others. A row's projection may be off by twice the square root of n times an element's
/// tolerance, for the errors of its n elements are independent.
namespace flashoverlap::cli {

struct CheckResult {
  double max_error = 0;  ///< Of the element that comes closest to its tolerance, or is furthest beyond it.
  double tolerance = 0;  ///< Of that element.
  std::int64_t elements = 0;  ///< Computed one by one; the others are covered by the projection.
  std::string wrong;  ///< Empty: correct. Otherwise the first element or row that is not, and its place.
  [[nodiscard]] bool correct() const { return wrong.empty(); }

  /// Keeps the worse of two results.
  void merge(const CheckResult& other);
};

/// What adds the partial results of ranks.
enum class SumRounding {
  kOnce,      ///< In float32: only the result is rounded to the type.
  kEverySum,  ///< In the type itself, one rank after the other, in any order: NCCL.
};

class ResultCheck {
 public:
  /// `inputs` has one entry per rank and must outlive this. `tile_m` is the plan's tile height, which decides
  /// the rows that a rank owns in block-cyclic order.
  ResultCheck(const ProblemOptions& options, const Routing& routing, const std::vector<Inputs>& inputs,
              std::int64_t tile_m, SumRounding sums = SumRounding::kOnce);

  /// Rows that `rank`'s output must have.
  [[nodiscard]] std::int64_t output_rows(int rank) const { return std::ssize(rows_of(rank)); }
  /// Checks the output of `rank`, [output_rows(rank), n]. May be called from several threads.
  [[nodiscard]] CheckResult check(int rank, const Matrix& out) const;

 private:
  /// Where a row of an output comes from: this row of the product of one rank, or of the sum over all.
  struct Source {
    std::int64_t row = 0;
    int first_rank = 0;
    int num_ranks = 0;
  };
  struct Expected {
    double value = 0;
    double tolerance = 0;
  };

  [[nodiscard]] const std::vector<Source>& rows_of(int rank) const {
    return rows_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] Expected element(const Source& source, std::int64_t col) const;
  [[nodiscard]] double projection(const Source& source) const;
  [[nodiscard]] double projection_tolerance(const Source& source) const;
  void check_projections(int rank, const Matrix& out, CheckResult& result) const;
  void check_elements(int rank, const Matrix& out, CheckResult& result) const;
  void project_inputs();
  /// Sums that are rounded before the last one.
  [[nodiscard]] double num_rounded_sums(const Source& source) const {
    return sums_ == SumRounding::kEverySum && source.num_ranks > 2 ? source.num_ranks - 2 : 0;
  }

  const ProblemOptions options_;
  const SumRounding sums_;
  const std::vector<Inputs>& inputs_;
  std::vector<std::vector<Source>> rows_;         ///< Per rank, per row of its output.
  std::vector<double> signs_;                     ///< v: n numbers, each 1 or -1.
  std::vector<std::vector<double>> projections_;  ///< Per rank, per row of its product.
};

}  // namespace flashoverlap::cli
