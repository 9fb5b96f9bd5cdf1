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
  kSerial,   ///< One collective, before or after the whole GEMM: the baseline, and the oracle bit for bit.
  kSliced,   ///< Equal slices on a collective each, for comparison: see BaselineOptions.
};

/// How an operator that has the choice overlaps GEMM and communication.
enum class OverlapMethod {
  kSignal,    ///< Finished wave groups signal, a collective moves each (arXiv 2504.19519).
  kTailFree,  ///< Slices by direct transfers, with none left at either end (arXiv 2604.24013).
  /// Signal where tail-free does not apply: with a partition given, more than 64 ranks, or an executor that
  /// cannot carry it out. Otherwise, where the context's tuner knows the machine, whichever of tail-free,
  /// signal and serial is quickest in simulation (rank 0's tuner decides for all); signal where the tuner has
  /// a tuned entry of exactly this call and knows no more; and tail-free where nothing is known. Serial is
  /// kSignal with one wave group.
  kAuto,
};

[[nodiscard]] std::string_view name_of(OverlapMethod method);  ///< "signal", "tail-free", "auto"

/// Baselines that an operator makes ready besides its own plan.
struct BaselineOptions {
  std::int64_t num_slices = 0;  ///< Of Method::kSliced, which costs memory of its own; 0: none.
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

/// out[owned rows, n] = epilogue(this rank's rows of the sum). See RowOwnership and `owned_rows`. The result
/// has the same bits whatever the method.
class GemmReduceScatter : public GemmOperator {
 public:
  /// By signals.
  GemmReduceScatter(Context& context, const GemmOptions& options,
                    RowOwnership rows = RowOwnership::kContiguous);
  /// Rank r keeps slice r of the rows. Tail-free: options.partition must be empty.
  GemmReduceScatter(Context& context, const GemmOptions& options, OverlapMethod method,
                    const SliceOptions& slices = {}, const BaselineOptions& baseline = {});

  [[nodiscard]] OverlapMethod method() const { return method_; }  ///< Never kAuto.

 private:
  OverlapMethod method_ = OverlapMethod::kSignal;
};

/// out[m, n] = epilogue(A · B_r^T): a column-parallel linear layer behind sequence parallelism. Rank r holds
/// slice r of A's rows and its own B_r; the other rows arrive while the GEMM runs (arXiv 2604.24013).
///
/// `Operands::a` is the whole A, [m, k] and dense (lda = k), with this rank's rows in place; the others are
/// *written*, and stay for whoever needs them next. Method::kSliced has the rows of A and of the output in
/// the order of `sliced_rows`.
class AllGatherGemm final : public GemmOperator {
 public:
  AllGatherGemm(Context& context, const GemmOptions& options, const SliceOptions& slices = {},
                const BaselineOptions& baseline = {});
  [[nodiscard]] std::int64_t first_row() const { return first_row_; }  ///< Of this rank's slice.
  [[nodiscard]] std::int64_t num_rows() const { return num_rows_; }

 private:
  std::int64_t first_row_ = 0;
  std::int64_t num_rows_ = 0;
};

/// out[m, n] = epilogue(A_r · B^T): the forward pass of a linear layer whose weight is spread over data-
/// parallel ranks (arXiv 2604.24013, DP). Rank r holds slice r of B's rows (output features).
///
/// `Operands::b` is the whole B, [n, k] and dense (ldb = k), with this rank's rows in place; the others are
/// *written*. options.m, n, k must be equal on all ranks: each has as many samples.
class ShardedWeightGemm final : public GemmOperator {
 public:
  ShardedWeightGemm(Context& context, const GemmOptions& options, const SliceOptions& slices = {},
                    const BaselineOptions& baseline = {});
  [[nodiscard]] std::int64_t first_row() const { return first_row_; }  ///< Of B, this rank's slice.
  [[nodiscard]] std::int64_t num_rows() const { return num_rows_; }

 private:
  std::int64_t first_row_ = 0;
  std::int64_t num_rows_ = 0;
};

/// The backward pass of the same layer: rank r keeps slice r of the rows of the weight's gradient, summed
/// over ranks. With Y = X · W^T, dW = dY^T · X: `Operands::a` is dY^T, [output features, samples], and
/// `Operands::b` is X^T, [input features, samples]; options.m, n, k are output features, input features and
/// samples of one rank; out is [rows of slice r, input features].
class GradientReduceScatter final : public GemmReduceScatter {
 public:
  GradientReduceScatter(Context& context, const GemmOptions& options, const SliceOptions& slices = {},
                        const BaselineOptions& baseline = {})
      : GemmReduceScatter(context, options, OverlapMethod::kTailFree, slices, baseline) {}
};

/// Row i of A_r · B_r^T goes to rank destinations[i]. out[received rows, n] = epilogue(rows from rank 0, 1,
/// …, in row order). options.m is this rank's destinations.size().
class GemmAllToAll final : public GemmOperator {
 public:
  GemmAllToAll(Context& context, const GemmOptions& options, std::span<const std::int32_t> destinations);
  /// Along heads (arXiv 2604.24013, UP): before Ulysses attention. Rank r has the rows of A of its tokens and
  /// all of B: `Operands::a` is [slices.rows of r, k]. Columns go to ranks: out[options.m, slices.columns of
  /// this rank] = epilogue(rows from rank 0, 1, …). options.m is all tokens; the bias is that of this rank's
  /// columns. RMSNorm in the epilogue is over these columns alone.
  /// Method::kSliced has the rows of the output in the order of `sliced_rows` of slices.rows.
  GemmAllToAll(Context& context, const GemmOptions& options, const HeadSlices& slices,
               const BaselineOptions& baseline = {});
  /// Rows that come from each rank; output row order follows it.
  [[nodiscard]] const std::vector<std::int64_t>& rows_from() const;

 private:
  std::vector<std::int64_t> rows_from_;
};

/// out[rows of this rank, n] = epilogue(A[rows of this rank, k] · B^T), where rank s has the columns of A of
/// its heads (arXiv 2604.24013, UP): the output projection behind Ulysses attention. The GEMM begins with
/// this rank's columns and takes those of the other ranks as they arrive, summed in float32 in one order, so
/// that results are bitwise repeatable and, on CPUs, the same as by Method::kSerial.
///
/// `Operands::a` is [options.m, slices.columns of this rank], dense: what attention gives, for all tokens.
/// `Operands::b` is the whole B, [n, k]. options.m is all tokens, options.k all heads' columns;
/// slices.columns cuts k, and its `parts` cut what travels between two ranks into strips of rows. The
/// workspace holds the columns that arrive, [rows of this rank, k - own columns], and for 16-bit types a
/// float32 copy of the output. Method::kSliced takes `a` in pieces of its columns, one dense matrix after the
/// other, and sums in another order: see plan_sliced_all_to_all_gemm.
class AllToAllGemm final : public GemmOperator {
 public:
  AllToAllGemm(Context& context, const GemmOptions& options, const HeadSlices& slices = {},
               const BaselineOptions& baseline = {});
  [[nodiscard]] std::int64_t first_row() const { return first_row_; }        ///< Of this rank's tokens.
  [[nodiscard]] std::int64_t first_column() const { return first_column_; }  ///< Of this rank's heads.
  [[nodiscard]] std::int64_t num_columns() const { return num_columns_; }

 private:
  std::int64_t first_row_ = 0;
  std::int64_t first_column_ = 0;
  std::int64_t num_columns_ = 0;
};

}  // namespace flashoverlap
