#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flashoverlap/communicator.h"
#include "flashoverlap/executor.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/plan_builders.h"

/// What users call. One object per rank and call shape, made once and called often; all ranks make the same
/// calls in the same order, like collectives.
namespace flashoverlap {

class CallTuner;

/// What operators of one rank share: the communicator, the executor with its threads and streams, and the
/// workspace. Not thread-safe: one thread at a time. Operators of any number of shapes may be used in turn.
/// After a call has failed on any rank the communicator is aborted and the context with it: every further
/// call throws; make a new communicator to go on.
struct ContextOptions {
  int num_threads =
      0;  ///< Compute threads of this rank, >= 1; 0: cores of this machine / ranks here, at least 1.
  std::int64_t workspace_limit_bytes =
      0;                          ///< Error(kOutOfMemory) on all ranks when a call needs more; 0: no limit.
  bool poison_workspace = false;  ///< Fill workspaces with NaN before each call (tests).
  ExecutorHooks hooks = {};       ///< Delays and failures on purpose (studies, tests).
};

class Context {
 public:
  /// On CPU threads.
  explicit Context(std::shared_ptr<Communicator> communicator, const ContextOptions& options = {});
  /// On any executor that was made with this communicator; for GPUs see make_cuda_executor (cuda_context.h).
  Context(std::shared_ptr<Communicator> communicator, std::unique_ptr<Executor> executor);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Operators made from now on get what their options leave open from `tuner` (call_tuner.h): rank 0's
  /// decides for all ranks. All ranks must set one, or none. Null: the built-in defaults.
  void set_tuner(std::shared_ptr<const CallTuner> tuner);
  [[nodiscard]] const CallTuner* tuner() const;

  [[nodiscard]] Communicator& communicator() const;
  [[nodiscard]] Executor& executor() const;
  [[nodiscard]] int num_threads() const;  ///< Compute threads; 0 where the executor was passed in.
  /// Bytes of workspace that this rank holds: the packed output (all-to-all: and the received one) of the
  /// most demanding operator so far, and a few tiles for each thread.
  [[nodiscard]] std::int64_t workspace_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The shape of a GEMM and how to overlap it. All ranks pass the same values (all-to-all: m may differ).
struct GemmOptions {
  std::int64_t m = 0;  ///< Rows of A, >= 0.
  std::int64_t n = 0;  ///< Rows of B, columns of the output, >= 0.
  std::int64_t k = 0;  ///< Columns of A and B, >= 0.
  DType dtype = DType::kFloat32;
  std::int64_t tile_m = 0;  ///< 0: chosen.
  std::int64_t tile_n = 0;
  std::int64_t swizzle = 0;                  ///< 0: chosen.
  std::vector<std::int64_t> partition = {};  ///< Waves per group; empty: chosen.
};

/// How one call is carried out.
enum class Method {
  kOverlap,  ///< By the overlap plan.
  kSerial,   ///< GEMM, then one collective, then the epilogue: the baseline, and the oracle bit for bit.
};

/// Common to all GEMM operators.
class GemmOperator {
 public:
  virtual ~GemmOperator();

  /// Runs once; see `Operands` for the matrices. Blocks until the output is complete on this rank (CPU).
  /// Throws Error.
  void operator()(const Operands& operands, Method method = Method::kOverlap);
  /// The same, with the parts switched off that `mode` says, and with spans appended to `timeline` when it is
  /// not null.
  void run(const Operands& operands, Method method, Mode mode, Timeline* timeline);

  [[nodiscard]] const OverlapPlan& plan(Method method = Method::kOverlap) const;
  [[nodiscard]] std::int64_t output_rows() const;

 protected:
  GemmOperator() = default;
  struct State;
  std::unique_ptr<State> state_;
};

/// out[m, n] = epilogue(sum over ranks r of A_r[m, k] · B_r[n, k]^T) on every rank: a row-parallel linear
/// layer.
class GemmAllReduce final : public GemmOperator {
 public:
  /// Collective: makes the plan, agrees on it with the other ranks. Error(kBadArgument) on every rank, naming
  /// the rank and the option, when any rank's options do not hold, or when they differ.
  GemmAllReduce(Context& context, const GemmOptions& options);
};

/// out[owned rows, n] = epilogue(this rank's rows of the sum). See RowOwnership and `owned_rows`.
class GemmReduceScatter final : public GemmOperator {
 public:
  GemmReduceScatter(Context& context, const GemmOptions& options,
                    RowOwnership rows = RowOwnership::kContiguous);
};

/// Row i of A_r · B_r^T goes to rank destinations[i]. out[received rows, n] = epilogue(rows from rank 0, 1,
/// …, in row order). options.m is this rank's destinations.size().
class GemmAllToAll final : public GemmOperator {
 public:
  GemmAllToAll(Context& context, const GemmOptions& options, std::span<const std::int32_t> destinations);
  /// Rows that come from each rank; output row order follows it.
  [[nodiscard]] const std::vector<std::int64_t>& rows_from() const;

 private:
  std::vector<std::int64_t> rows_from_;
};

}  // namespace flashoverlap
