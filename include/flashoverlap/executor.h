#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "flashoverlap/communicator.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/timeline.h"

namespace flashoverlap {

namespace plan {
class MoeDevice;
}

enum class Activation {
  kNone,
  kRelu,
  kGelu,
  kSilu
};  ///< GELU: the tanh form is not used; x/2 (1 + erf(x/sqrt 2)).

[[nodiscard]] std::string_view name_of(Activation activation);  ///< "none", "relu", "gelu", "silu"

/// Applied once to the sum over ranks, never to a rank's partial result, in float32 in this order:
///   y = activation(sum + bias);  h = y + residual;  out = rms_norm_weight ? h / sqrt(mean(h^2) + eps) *
///   weight : h
/// Pointers are to memory where the executor runs; null: that step is left out. Type: the plan's, rows are
/// output rows.
struct Epilogue {
  const void* bias = nullptr;  ///< [n]
  Activation activation = Activation::kNone;
  const void* residual = nullptr;  ///< [output rows, n], leading dimension residual_ld.
  std::int64_t residual_ld = 0;
  void* residual_out = nullptr;  ///< [output rows, n]: h, for the next layer. May be the same as `residual`.
  std::int64_t residual_out_ld = 0;
  const void* rms_norm_weight = nullptr;  ///< [n]
  float rms_norm_eps = 1e-6F;
};

/// Makes rows [first_row, first_row + num_rows) of A where `Operands::a` has them. On CPUs several threads
/// call it at a time, for different rows; on a GPU the thread that makes the call does, and what it puts into
/// Operands::stream makes the rows. May throw: the run then fails on every rank, as if a tile had failed.
using RowProducer = std::function<void(std::int64_t first_row, std::int64_t num_rows)>;

/// Whether a slice of the plan that is carried out has arrived. Error(kBadArgument) for one that it has not.
using SliceArrived = std::function<bool(std::int64_t slice)>;

/// Does one piece of work that is not the call's own, and returns true; false: there is none that can be done
/// now. May read what `has_arrived` says is there.
using OtherWork = std::function<bool(const SliceArrived& has_arrived)>;

/// The matrices of one call. Leading dimensions are in elements, >= the row length.
struct Operands {
  const void* a = nullptr;  ///< [m, k]
  std::int64_t lda = 0;
  const void* b = nullptr;  ///< [n, k]
  std::int64_t ldb = 0;
  void* out = nullptr;  ///< [output rows, n]; must not overlap a or b.
  std::int64_t ldo = 0;
  Epilogue epilogue;
  void* stream =
      nullptr;  ///< GPU executors: the cudaStream_t that the call is put into. CPU executors ignore it.
  /// When set, A need not be complete at the call: each run of rows that a row of tiles reads is made by one
  /// call of this, before its first tile, in the order in which the schedule comes to them. What makes A (an
  /// attention per query slice, an activation) then hides communication as the tiles do. Called once for
  /// every row that a tile reads, whatever the method, in all modes but kCommunicationOnly. On a GPU rows of
  /// one slice that is sent are made together, and its tiles are a launch behind them.
  /// Error(kUnsupported) where `Executor::makes_rows` says no, and where A itself travels (AllGatherGemm,
  /// AllToAllGemm).
  RowProducer make_rows = {};
  /// When set: what compute threads do rather than wait, be it for a slice or, after the last tile, for the
  /// transfers to end. So what nobody waits for (gradients of weights) hides communication that the tiles are
  /// too few for. One call does one piece, of no more than about a tile's time: the tile that waits starts no
  /// sooner. Several threads call at a time. How often depends on the transfers alone, and may be never (in
  /// modes other than kRun, on GPUs always), so whoever gives it does what is left after the call. May throw:
  /// the run then fails on every rank, as if a tile had failed.
  OtherWork other_work = {};
};

/// What of a plan is carried out. All but kRun exist to measure the parts on their own; they leave the output
/// undefined.
enum class Mode {
  kRun,                ///< Everything.
  kGemmOnly,           ///< Tiles through placement and counters, no communication, no restore.
  kPlainGemm,          ///< The same tiles in the same order, written in place of their own, without counters.
  kCommunicationOnly,  ///< The transfers alone, on whatever the buffers hold.
};

/// Called at points of a run, by several threads at a time: to sleep there (to study stragglers) or to throw
/// (to study failures: the run then fails on every rank, as if the work itself had failed). Empty: not
/// called.
struct ExecutorHooks {
  std::function<void(std::int64_t tile)> before_tile = {};  ///< Before a compute unit starts the tile.
  std::function<void(std::int64_t transfer)> before_transfer =
      {};                                        ///< Before a stream starts the transfer, after its trigger.
  std::function<void()> before_other_work = {};  ///< Before a compute unit asks Operands::other_work.
};

/// A product that an executor is asked about.
struct ProductShape {
  std::int64_t m = 0;  ///< Rows of A.
  std::int64_t n = 0;  ///< Rows of B.
  std::int64_t k = 0;  ///< Columns of A and B.
  DType dtype = DType::kFloat32;
  /// Where A lies in blocks of columns (InputBlock), what the blocks' widths are multiples of; 0: it is one
  /// matrix.
  std::int64_t block_columns = 0;
};

/// What suits an executor where the caller of an operator leaves it open.
struct PlanShape {
  std::int64_t tile_m = 0;
  std::int64_t tile_n = 0;
  std::int64_t swizzle = 1;
  Resources resources;
  std::int64_t slice_parts = 0;  ///< SliceOptions::parts; 0: the plan builder's choice.
};

/// A verified plan with what an executor derived from it (index tables, device copies, buffers).
class PreparedPlan {
 public:
  virtual ~PreparedPlan() = default;
  [[nodiscard]] virtual const OverlapPlan& plan() const = 0;
};

/// Carries out plans on one rank. Knows nothing of all-reduce or experts: it issues tiles in schedule order,
/// honours gates, writes through placement, counts, starts transfers, restores.
class Executor {
 public:
  virtual ~Executor() = default;

  /// Verifies `plan` and makes what is needed to run it often. Throws Error(kBadArgument) with verify's
  /// reason, or Error(kUnsupported) when this executor cannot carry it out.
  [[nodiscard]] virtual std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) = 0;

  /// Runs a prepared plan to its end (CPU) or puts it into the caller's stream (GPU). Checks the operands
  /// before anything is written: null or misaligned pointers, leading dimensions, out overlapping an input:
  /// Error(kBadArgument). When this rank or another one fails, aborts the communicator and throws.
  /// `timeline`, when not null, gets this rank's spans appended, in microseconds of
  /// std::chrono::steady_clock.
  virtual void execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) = 0;

  /// What plans of this product should look like to run well here; nothing: any plan will do. The same on all
  /// ranks whose machines are alike. Throws Error(kUnsupported) for an element type that this executor cannot
  /// compute.
  [[nodiscard]] virtual std::optional<PlanShape> suggest(const ProductShape& /*product*/) const {
    return std::nullopt;
  }

  /// Whether `execute` calls Operands::make_rows.
  [[nodiscard]] virtual bool makes_rows() const { return false; }

  /// The memory and the passes of one layer of experts where this executor's operands lie; null: the host's.
  [[nodiscard]] virtual std::shared_ptr<plan::MoeDevice> make_moe_device() const { return nullptr; }

  /// Bytes of workspace held now: what was needed by the most demanding plan prepared or run so far.
  [[nodiscard]] virtual std::int64_t workspace_bytes() const = 0;
};

}  // namespace flashoverlap
