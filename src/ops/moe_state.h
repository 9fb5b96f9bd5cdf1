#pragma once

#include <chrono>
#include <deque>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/thread_pool.h"
#include "cpu/workspace.h"
#include "flashoverlap/moe_layer.h"
#include "ops/moe_chooser.h"
#include "ops/moe_passes.h"
#include "ops/moe_rows.h"
#include "plan/moe_device.h"

namespace flashoverlap {

/// What a layer holds between calls. Its parts are in moe_layer.cpp, moe_call.cpp and moe_backward.cpp.
struct MoeLayer::State {
  State(Context& context_of_layer, const MoeLayerOptions& options_of_layer);

  /// A rank's shape of one call, and the plans for it; kept while nothing changes.
  struct Plans {
    MoePlanOptions options;
    MoeCounts counts;
    std::int64_t dispatch_n = 0;
    std::int64_t combine_k = 0;
    std::unique_ptr<PreparedPlan> dispatch;
    std::unique_ptr<PreparedPlan> combine;
  };

  /// The last forward: what backward and measure_parts go on from.
  struct Call {
    MoeRouting routing;
    MoeCounts counts;
    MoeLayout layout;
    ops::SendRows rows;
    ops::RowPlaces places;
    std::int64_t all_dropped = 0;
    std::int64_t product_rows = -1;  ///< Rows told to the device for products over rows; -1: none yet.
  };

  [[nodiscard]] ops::MoeActivation activation() const {
    return {options.activation, options.gated, options.intermediate};
  }
  [[nodiscard]] std::int64_t element() const { return size_of(options.dtype); }
  [[nodiscard]] MoePlanOptions plan_options(Method method) const;
  /// Of the dispatch: on a device rows travel in messages, see docs/moe.md.
  [[nodiscard]] MoePlanOptions dispatch_options(const MoePlanOptions& options) const;
  /// With tiles for the GEMM [.., k] x [n, k], where the caller left them open and a device chooses.
  [[nodiscard]] MoePlanOptions with_tile(MoePlanOptions options, const MoeCounts& counts, std::int64_t n,
                                         std::int64_t k) const;
  [[nodiscard]] std::uint64_t agreement(std::string_view call, std::int32_t top_k, Method method) const;
  [[nodiscard]] std::string label() const;

  void check_matrix(const char* name, const void* data, const char* ld_name, std::int64_t ld,
                    std::int64_t rows) const;
  void check_weights(const MoeWeights& weights) const;

  /// Meets the other ranks: counts, observations of the call before; decides on the setting and the method.
  MoeCounts exchange_counts(const MoeRouting& routing, const std::function<void()>& check, Method& method,
                            MoeReport& report);
  /// How to carry out a call with these counts; the same on all ranks. moe_overlap_if.cpp.
  [[nodiscard]] Method decide(Method asked, const MoeCounts& counts, double last_call_us, MoeReport& report);
  [[nodiscard]] ops::MoeChooser::Decision predict(const MoeCounts& counts);
  void meet(const char* what, const std::function<void()>& check, Method method);
  void start_call(const MoeRouting& routing, const MoeCounts& counts);
  /// Makes `plans` those of the call, unless they or `earlier` are; of new ones only that of the dispatch.
  void prepare(Plans& plans, Plans& earlier, Method method, std::int64_t dispatch_n,
               std::int64_t combine_k) const;
  /// Made on first use: on a GPU while the dispatch runs.
  PreparedPlan& combine_of(Plans& plans) const;
  void reserve_forward();
  /// `weights`, or where this rank has no expert and so may have none, memory that nobody reads.
  [[nodiscard]] const void* weights_or_nothing(const void* weights);
  /// One GEMM: out [.., ldo] = a [.., lda] · B^T.
  struct Gemm {
    const cpu::AlignedBuffer& a;
    std::int64_t lda = 0;
    const void* b = nullptr;
    const cpu::AlignedBuffer& out;
    std::int64_t ldo = 0;
    [[nodiscard]] Operands operands() const;
  };
  /// The forward's.
  Gemm first_gemm(const MoeWeights& weights);
  Gemm second_gemm(const MoeWeights& weights);
  void run_dispatch(Plans& plans, const Gemm& gemm, Timeline* timeline, OtherWork other_work = {}) const;
  /// Second GEMM with its return; fills in backlog and idle time.
  void run_combine(Plans& plans, const Gemm& gemm, Timeline* timeline, MoeReport& report,
                   OtherWork other_work = {});
  Parts measure_parts(Plans& plans, const Gemm& first_gemm, const Gemm& second_gemm) const;
  /// Of the phase with the first GEMM, or with the second: runs its plan and says how long that took, in us.
  using TimedRun = std::function<double(PreparedPlan& plan, bool is_first, Mode mode)>;
  /// Each part by itself, all ranks beginning together.
  Parts measure_each(const Plans& plans, const TimedRun& run) const;

  /// Where rows lie in a device's memory: moe_on_device.cpp, and moe_backward_on_device.cpp.
  struct DeviceCall {
    const void* x = nullptr;
    std::int64_t ldx = 0;
    void* out = nullptr;
    std::int64_t ldo = 0;
    void* stream = nullptr;
  };
  void check_consumers() const;
  void check_device_options() const;
  /// Before the ranks meet: what is known of calls before, without waiting for any but trials of overlap_if.
  void recall_device();
  struct NamedMatrix {
    const char* name;
    const void* data;  ///< Null: not looked at.
  };
  /// On a device, of this rank's tokens and of its experts: whether they lie there.
  void check_device_memory(std::int64_t tokens, std::initializer_list<NamedMatrix> of_tokens,
                           std::initializer_list<NamedMatrix> of_weights) const;
  void forward_on_device(const DeviceCall& on, const MoeWeights& weights, Timeline* timeline,
                         MoeReport& report);
  /// What a backward is given.
  struct BackwardCall {
    const void* out_gradient = nullptr;
    std::int64_t ldg = 0;
    const MoeWeights& weights;
    const MoeGradients& gradients;
    Method method = Method::kOverlap;
  };
  class BackwardOnDevice;
  /// In the stream of the forward before it.
  void backward_on_device(const BackwardCall& on, Timeline* timeline);
  /// Memory of at least so many elements, poisoned where that is asked for.
  void* reserve_on_device(plan::MoeDevice::Buffer buffer, std::int64_t elements, void* stream);
  struct DeviceGemm {
    const void* a = nullptr;
    std::int64_t lda = 0;
    const void* b = nullptr;  ///< Of no matter where this rank has no expert.
    void* out = nullptr;
    std::int64_t ldo = 0;
  };
  /// `us`, with a timeline: the time that GEMM and transfers take. Without one nothing waits for the device.
  void run_on_device(PreparedPlan& plan, const DeviceGemm& gemm, void* stream, Timeline* timeline,
                     double* us = nullptr, Mode mode = Mode::kRun);
  Parts measure_parts_on_device(Plans& plans, const DeviceGemm& first_gemm, const DeviceGemm& second_gemm);
  /// The GEMMs of the last forward and of the last backward, whose rows are still there.
  struct DeviceGemms {
    DeviceGemm first, second;
  };
  [[nodiscard]] DeviceGemms forward_gemms(const MoeWeights& weights);
  [[nodiscard]] DeviceGemms backward_gemms();
  void fill_report(MoeReport& report, Method method) const;

  Context& context;
  Communicator& communicator;
  MoeLayerOptions options;
  std::shared_ptr<plan::MoeDevice> device;  ///< Null: rows lie in the host's memory.
  std::int64_t tile_units = 0;  ///< Rank 0's, by which all choose tiles: theirs may be more or fewer.
  std::int64_t first = 0;       ///< Local experts are [first, first + count).
  std::int64_t count = 0;
  MoeController controller;
  cpu::ThreadPool pool;
  Plans forward_plans;
  Plans backward_plans;
  /// Those of the call before, which are often wanted again: calls that change their method make none anew.
  Plans earlier_forward_plans;
  Plans earlier_backward_plans;
  std::optional<Call> call;
  void* device_stream = nullptr;  ///< Of the last forward, on a device.
  bool results_valid = false;     ///< Buffers hold what the last forward left.
  bool backward_valid = false;    ///< And the last backward, of that forward.
  /// On a device, calls whose consumers have yet to tell, oldest first: which put_calls() they were.
  struct Pending {
    std::int64_t put_call = 0;
    MoeSetting setting;
  };
  std::deque<Pending> pending;
  MoeObservation observation;
  bool observed = false;
  double call_us = 0;  ///< Of the last forward on this rank; 0: not known.
  ops::MoeChooser chooser;
  ops::MoeChooser::Decision predicted;
  std::int64_t predicted_rows = -1;       ///< For which `predicted` holds.
  Method call_method = Method::kOverlap;  ///< Of the last forward.

  cpu::AlignedBuffer rows;       ///< A of the first GEMM: [places.num_rows, H]
  cpu::AlignedBuffer hidden;     ///< [layout.rows, U]
  cpu::AlignedBuffer activated;  ///< [layout.rows, I]
  cpu::AlignedBuffer results;    ///< [send_rows, H]
  // Backward.
  cpu::AlignedBuffer gradient_rows;       ///< As rows.
  cpu::AlignedBuffer activated_gradient;  ///< As activated.
  cpu::AlignedBuffer hidden_gradient;     ///< As hidden.
  cpu::AlignedBuffer result_gradient;     ///< As results: gradients by the rows sent.
  cpu::AlignedBuffer transposed_up;       ///< [local experts, H, U]
  cpu::AlignedBuffer transposed_down;     ///< [local experts, I, H]
  cpu::AlignedBuffer nothing;             ///< [max(U, I), H] where this rank has no expert
};

namespace ops {

/// Microseconds since the last call of `lap` or since it was made.
class Stopwatch {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    const double us = std::chrono::duration<double, std::micro>(now - last_).count();
    last_ = now;
    return us;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// What the spans of a run of the second GEMM tell.
MoeObservation observe(const Timeline& timeline);

}  // namespace ops
}  // namespace flashoverlap
