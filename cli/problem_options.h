#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/in_process.h"
#include "flashoverlap/operators.h"

/// What every subcommand that works on an operator asks: which one, its shape, its ranks, and how to cut it.
namespace flashoverlap::cli {

enum class Op { kGemmAllReduce, kGemmReduceScatter, kGemmAllToAll };

std::string_view name_of(Op op);
const std::vector<std::string>& op_names();

struct ProblemOptions {
  Op op = Op::kGemmAllReduce;
  std::int64_t m = 2048;
  std::int64_t n = 2048;
  std::int64_t k = 1024;
  std::int64_t ranks = 2;
  DType dtype = DType::kFloat32;
  std::int64_t tile_m = 0;  ///< 0: chosen by the operator; so for tile_n and swizzle.
  std::int64_t tile_n = 0;
  std::int64_t swizzle = 0;
  std::vector<std::int64_t> partition;  ///< Empty: chosen by the operator.
  RowOwnership rows = RowOwnership::kContiguous;
  double skew = 0;
  std::vector<std::int64_t> rows_to_rank;  ///< Empty: by `skew`.
  /// gemm-reduce-scatter: how it is overlapped, compared with a baseline in slices. Empty: by signals,
  /// without that baseline.
  std::optional<OverlapMethod> method = std::nullopt;
  SliceOptions slices;               ///< With `method`.
  std::int64_t baseline_slices = 4;  ///< With `method`; 0: none.
  std::int64_t threads = 0;          ///< Compute threads of each rank; 0: cores / ranks, at least 1.
  std::uint64_t seed = 1;
  bool is_job = false;                     ///< Ranks are the processes of an MPI job; see process_ranks.h.
  std::shared_ptr<const CallTuner> tuner;  ///< Chooses what is left open; null: the operator's defaults.
  [[nodiscard]] bool has_sliced() const { return method.has_value() && baseline_slices > 0; }
};

enum class MethodOptions { kAbsent, kPresent };

/// Adds the options to `app`, those of `ProblemOptions::method` where they are to be present. `options` is
/// filled while parsing and checked as a whole at its end.
void add_problem_options(CLI::App& app, const std::shared_ptr<ProblemOptions>& options,
                         MethodOptions method = MethodOptions::kAbsent);

/// Throws CLI::ValidationError where the method cannot be carried out by ranks that are threads.
void require_runnable(const ProblemOptions& options);

/// Where each row of each rank's product goes (all-to-all only). With rows_to_rank, every rank sends
/// rows_to_rank[d] rows to rank d. Otherwise a share `skew` of a rank's rows goes to rank 0 and the rest
/// evenly to all ranks. In both cases rows of all destinations are mixed, in an order that depends on the
/// seed and the rank.
Routing make_routing(const ProblemOptions& options);

/// What the library is asked for.
GemmOptions gemm_options(const ProblemOptions& options);
ContextOptions context_options(const ProblemOptions& options);

/// Throws Error(kOutOfMemory), naming the options, when `bytes` is more than this machine has available.
void require_memory(double bytes);

/// Bytes that all ranks' matrices, packed copies and plans take, about.
double memory_estimate(const ProblemOptions& options);

/// As run_ranks; an error that is about the partition names its option.
void run_problem(const ProblemOptions& options, const LinkModel& link,
                 const std::function<void(const std::shared_ptr<Communicator>&)>& function);

/// Makes the operator of one rank.
std::unique_ptr<GemmOperator> make_operator(Context& context, const ProblemOptions& options,
                                            const Routing& routing);

}  // namespace flashoverlap::cli
