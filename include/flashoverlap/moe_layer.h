#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/moe_controller.h"
#include "flashoverlap/moe_plan.h"
#include "flashoverlap/moe_routing.h"
#include "flashoverlap/operators.h"

/// The mixture-of-experts layer with both all-to-alls hidden behind the expert GEMMs.
namespace flashoverlap {

/// Which calls with Method::kOverlap are overlapped.
enum class MoeOverlapIf {
  kAlways,
  /// Where it is faster: the first calls go both ways in turn, and are timed; then the faster way stays,
  /// until the rows of a rank change by more than a quarter, or for 1000 calls.
  kMeasured,
  /// Where the simulator says so for `MoeLayerOptions::machine`; asked again when the rows of a rank change
  /// by more than a quarter. Rank 0 decides.
  kPredicted,
};
[[nodiscard]] std::string_view name_of(MoeOverlapIf overlap_if);  ///< "always", "measured", "predicted"
/// Error(kBadArgument) for another name.
[[nodiscard]] MoeOverlapIf parse_moe_overlap_if(std::string_view name);

/// All ranks pass the same values.
struct MoeLayerOptions {
  std::int64_t hidden = 0;        ///< H: columns of tokens and results, >= 0.
  std::int64_t intermediate = 0;  ///< I, >= 0.
  std::int64_t num_experts = 1;   ///< E, of all ranks, >= 1; rank r has [r * E / W, (r + 1) * E / W).
  DType dtype = DType::kFloat32;
  /// With gate: y = W_down (activation(W_gate x) * (W_up x)); without: y = W_down activation(W_up x).
  bool gated = true;
  Activation activation = Activation::kSilu;  ///< kSilu with gate is SwiGLU.
  /// Both 0: chosen; on GPUs for each GEMM, by the rows that each owner has for each expert.
  std::int64_t tile_m = 0;
  std::int64_t tile_n = 0;
  MoePadding padding = MoePadding::kRagged;
  MoeOrder order = MoeOrder::kOwnerMajor;
  /// kPut needs a communicator with a symmetric heap (in-process has one, MPI has not); on GPUs ranks that
  /// address each other's memory, see `forward`.
  MoeTransport transport = MoeTransport::kPut;
  std::int64_t segment_bands = 2;  ///< Bands of an inner segment, >= 1.
  /// Streams that put segments, in [1, 16]; on GPUs SMs, which the second GEMM leaves to them, at least 1 and
  /// at most half of them all.
  std::int64_t consumers = 1;
  std::int64_t collective_groups = 4;  ///< kCollective: all-to-alls of the results.
  /// Rows that an expert takes at most, of all ranks together; 0: no limit, nothing is dropped. Rows beyond
  /// are dropped in the order of ranks, and add nothing to their tokens; the report counts them.
  std::int64_t capacity = 0;
  /// Let the layer change consumers, compute threads (SMs) and segment_bands between calls.
  bool adapt = false;
  MoeControllerOptions controller = {};
  /// "Not overlapping where that wins": little to hide transfers behind, or transfers too small to cut.
  MoeOverlapIf overlap_if = MoeOverlapIf::kAlways;
  /// kPredicted: the machine, with its links. Rank 0 needs it; others' is not looked at.
  std::shared_ptr<const MachineProfile> machine = nullptr;
  bool poison_workspace = false;  ///< Fill the layer's buffers with NaN before each forward (tests).
};

/// Expert weights of this rank, dense, of the layer's type.
struct MoeWeights {
  const void* up =
      nullptr;  ///< [local experts, U, H]; U = 2 I with gate (rows [0, I): gate, then up), else I.
  const void* down = nullptr;  ///< [local experts, H, I]
};

/// The phases of one call, in microseconds, on this rank. On GPUs: counts_us, and with a timeline dispatch_us
/// and combine_us, without the passes behind them.
struct MoePhases {
  double counts_us = 0;      ///< Exchange of counts and making of plans.
  double gather_us = 0;      ///< Send rows and own rows put in order.
  double dispatch_us = 0;    ///< Dispatch and first GEMM.
  double activation_us = 0;  ///< And, backward, its gradient.
  double combine_us = 0;     ///< Second GEMM and return.
  double reduce_us = 0;      ///< Weighted sum over slots.
  /// Backward: gradients of the weights, and transposing the weights; overlapped: what of it was not done
  /// while rows travelled.
  double weights_us = 0;
  [[nodiscard]] double total_us() const {
    return counts_us + gather_us + dispatch_us + activation_us + combine_us + reduce_us + weights_us;
  }
};

/// What one call did, on this rank unless said otherwise.
struct MoeReport {
  MoePhases phases;
  MoeWaste waste;
  std::int64_t send_rows = 0;
  std::int64_t dropped_rows = 0;      ///< Of this rank's tokens.
  std::int64_t all_dropped_rows = 0;  ///< Of all ranks.
  std::int64_t workspace_bytes = 0;   ///< Rows and results held by the layer.
  /// From the last tile of the second GEMM to the end of the last transfer. On GPUs with transport kPut: of
  /// this call with a timeline, else, with `adapt`, of the last call that was over when this one began.
  double backlog_us = 0;
  /// Share of the second GEMM's time that the consumers waited for segments. On GPUs as backlog_us.
  double consumer_idle = 0;
  /// Backward, overlapped: work on gradients of the weights inside dispatch_us and combine_us, which compute
  /// threads did rather than wait. The mean over threads.
  double dispatch_work_us = 0;
  double combine_work_us = 0;
  MoeSetting setting;      ///< In force in this call.
  std::string adaptation;  ///< What the controller decided before it, and why; empty where it is off.
  Method method = Method::kOverlap;  ///< How it was carried out: kOverlap or kSerial.
  std::string choice;                ///< Why, where `overlap_if` decided; otherwise empty.
};

/// Gradients; null: not wanted, except where said.
struct MoeGradients {
  void* input = nullptr;  ///< [tokens, H], leading dimension input_ld. Needed.
  std::int64_t input_ld = 0;
  float* routing_weights = nullptr;  ///< [tokens, top_k]: by the weights of the routing; for route_gradient.
  float* up = nullptr;               ///< As MoeWeights::up, in float32; overwritten.
  float* down = nullptr;             ///< As MoeWeights::down, in float32; overwritten.
};

/// One MoE layer on the ranks of a context. Blocks until the result is complete on this rank.
///
///   out[t] = sum over slots s of weight[t, s] * expert_{experts[t, s]}(x[t])
///
/// in float32 in the order of the slots, rounded once: results are bitwise repeatable, and do not depend on
/// order, transport, segments, consumers or threads with padding kRagged. (The other paddings make tiles of
/// other heights, which the matrix library may round differently.)
///
/// Every call exchanges counts first, and so meets all ranks. What is wrong on one rank (routing, null
/// matrices, leading dimensions) makes every rank throw the same Error(kBadArgument), naming the rank, with
/// nothing written. A rank that fails or stalls later makes all throw within the communicator's time-out. Not
/// thread-safe, and one call at a time in a context.
class MoeLayer {
 public:
  /// Collective. Error(kBadArgument) on every rank when options do not hold or differ, Error(kUnsupported)
  /// when the communicator cannot put and transport is kPut.
  MoeLayer(Context& context, const MoeLayerOptions& options);
  ~MoeLayer();
  MoeLayer(const MoeLayer&) = delete;
  MoeLayer& operator=(const MoeLayer&) = delete;

  [[nodiscard]] const MoeLayerOptions& options() const;
  [[nodiscard]] std::int64_t first_expert() const;  ///< Of this rank.
  [[nodiscard]] std::int64_t local_experts() const;

  /// x: [routing.tokens, H], leading dimension ldx; out: likewise, must not overlap x. All ranks pass the
  /// same top_k; tokens may differ. kSerial: dispatch, then GEMMs, then return, with the same tiles: the
  /// baseline, and the oracle bit for bit. `timeline`, when not null, gets this rank's spans.
  /// On GPUs matrices are in the device's memory, and everything is put into `stream` (a cudaStream_t) once
  /// the ranks have met. A call with a timeline waits for the device, as does one behind a trial of
  /// MoeOverlapIf::kMeasured. Transport kPut needs ranks that address each other's memory
  /// (make_local_gpu_communicators), order kOwnerMajor and padding kRagged.
  MoeReport forward(const void* x, std::int64_t ldx, const MoeRouting& routing, const MoeWeights& weights,
                    void* out, std::int64_t ldo, Method method = Method::kOverlap,
                    Timeline* timeline = nullptr, void* stream = nullptr);

  /// Gradients of the call of `forward` before it, which must have had the same x, routing and weights, by
  /// the gradient of its output, out_gradient: [tokens, H]. Dropped rows have no gradient. The gradients'
  /// dispatch and return are hidden in the same way, and behind the gradients of the weights; where
  /// `overlap_if` decides, backward goes as its forward went. Same bits either way with padding kRagged. On
  /// GPUs all matrices are in the device's memory, and everything goes into the forward's stream, which must
  /// still be there. Error(kBadArgument) when there was no forward, or `gradients` has no input.
  MoeReport backward(const void* out_gradient, std::int64_t ldg, const MoeWeights& weights,
                     const MoeGradients& gradients, Method method = Method::kOverlap,
                     Timeline* timeline = nullptr);

  /// The plans of the call before, for this rank: first and second GEMM. Error(kBadArgument) before any call.
  [[nodiscard]] const OverlapPlan& dispatch_plan() const;
  [[nodiscard]] const OverlapPlan& combine_plan() const;

  /// The parts of the last call's forward alone, in microseconds, to tell how much is hidden: both GEMMs
  /// without communication, and both transfers without GEMMs. Collective. Leaves the layer's buffers
  /// undefined, so that no backward can follow. Error(kBadArgument) before any forward.
  struct Parts {
    double dispatch_gemm_us = 0;
    double dispatch_transfer_us = 0;
    double combine_gemm_us = 0;
    double combine_transfer_us = 0;
    double dispatch_us = 0;  ///< Both at a time, as in a call, but for that all ranks begin together.
    double combine_us = 0;
  };
  Parts measure_parts(const MoeWeights& weights);
  /// The same of the backward of the last forward, without gradients of the weights. What the forward left
  /// stays. Error(kBadArgument) before that backward.
  Parts measure_backward_parts();

  /// Adaptation on or off from the next call on; the setting in force stays. All ranks call it alike.
  void set_adaptive(bool adapt);
  [[nodiscard]] MoeSetting setting() const;

 private:
  struct State;
  class Backward;
  std::unique_ptr<State> state_;
};

}  // namespace flashoverlap
