#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/operators.h"

/// Operators by name.
namespace flashoverlap::python {

[[nodiscard]] GemmOptions gemm_options(std::int64_t m, std::int64_t n, std::int64_t k,
                                       const std::string& dtype, const std::vector<std::int64_t>& tile,
                                       const std::vector<std::int64_t>& partition);

/// `parts` and `send_channels` of both axes, of which only one is cut finer.
[[nodiscard]] HeadSlices slices_of(const std::vector<std::int64_t>& rows,
                                   const std::vector<std::int64_t>& columns, std::int64_t parts,
                                   std::int64_t send_channels);

/// What only some operators have.
struct OperatorOptions {
  RowOwnership rows = RowOwnership::kContiguous;
  OverlapMethod overlap = OverlapMethod::kSignal;
  std::vector<std::int32_t> destinations;
  HeadSlices slices;  ///< `columns` along heads only.
  BaselineOptions baseline;
};

/// Where the slices of a matrix that is gathered, or of an output along heads, lie in it.
struct Gathered {
  std::int64_t first_row = 0;  ///< Of this rank's slice of what is gathered.
  /// By the sliced baseline: for each row of the matrix as it arrives its row in the whole one. Empty: no
  /// such baseline.
  std::vector<std::int64_t> sliced;
};

struct MadeOperator {
  std::unique_ptr<GemmOperator> gemm;
  std::vector<std::int64_t> rows_from;  ///< All-to-all only.
  Gathered gathered;
};

/// Collective. "gemm-all-reduce", "gemm-reduce-scatter", "gradient-reduce-scatter", "gemm-all-to-all",
/// "gemm-all-to-all-heads", "all-to-all-gemm", "all-gather-gemm" or "sharded-weight-gemm".
[[nodiscard]] MadeOperator make_gemm_operator(Context& context, std::string_view name,
                                              const GemmOptions& options, const OperatorOptions& special);

}  // namespace flashoverlap::python
