// One operator at one shape on all ranks: checked, chosen, and timed in all its parts. What `rehearsal` and
// `cluster_bench` have in common.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "flashoverlap/bandwidth_curve.h"
#include "flashoverlap/partition_search.h"
#include "flashoverlap/plan_builders.h"
#include "gpu_ranks.h"
#include "signal_gemm.h"

namespace bench {

struct Shape {
  std::int64_t m = 0, n = 0, k = 0;  ///< Of one rank's GEMM.
};

std::vector<std::string> split(const std::string& text);  ///< At commas.
/// "MxNxK,…". Throws std::runtime_error naming what is not one.
std::vector<Shape> parse_shapes(const std::string& text);

struct OperatorSettings {
  int communication_sms = 24;
  int rounds = 7;
  int pause_ms = 10;
  bool with_epilogue = true;  ///< Residual + RMSNorm; else none.
  /// The signal GEMM's variant and swizzle by measurement of all of them; else as the executor suggests,
  /// which is what the library's users get.
  bool search_gemm = true;
};

struct Times {
  double cublas = 0, plain = 0, signal = 0;  ///< GEMM alone: cuBLAS; signal GEMM without and with placement
                                             ///< and signals.
  double communication = 0, grouped = 0;     ///< Transfers alone: in one call, in the plan's.
  double serial = 0, overlapped = 0;         ///< Whole calls.
  double by_default = 0;                     ///< Overlapped as the library does when nothing is tuned.
};

struct Result {
  int ranks = 0;
  int communication_sms = 0;
  std::string op;
  Shape shape{};
  Times us;
  std::string method;   ///< "signal", "messages" (all-gather) or "serial": what `overlapped` is.
  std::string variant;  ///< Of the signal GEMM.
  std::int64_t waves = 0;
  std::int64_t swizzle = 0;
  std::vector<std::int64_t> partition;  ///< All-gather: the parts of a slice.
  double predicted_us = 0;              ///< Of `overlapped`; see OperatorBench.
  double predicted_error = 0;  ///< Mean of |predicted - measured| / measured over the partitions tried,
                               ///< calibrated on the default one.
  double favourite = 0;        ///< Best measured time / time of the predictor's favourite.
  std::size_t tried = 0;
  unsigned wrong = 0;  ///< Elements in which serial and overlapped differ by more than rounding.
};

/// One rank's side. Operators: "ar", "rs", "a2a", and "ag", all-gather + GEMM, whose shape is that of the
/// whole gathered A.
///
/// Choice: the default partition and those that the predictor likes best are measured, and serial; the
/// quickest is taken ("auto"). Prediction of that one, from what is measured apart: the signal GEMM alone, in
/// equal waves; the collective's curve; and as epilogue what serial takes besides its two parts.
class OperatorBench {
 public:
  /// `serial_communicator`: of the same rank, for the serial baseline alone; null: the rank's.
  OperatorBench(flashoverlap::gpu_test::Rank& rank, const OperatorSettings& settings, std::string op,
                const Shape& shape,
                std::shared_ptr<flashoverlap::Communicator> serial_communicator = nullptr);
  ~OperatorBench();
  OperatorBench(const OperatorBench&) = delete;
  OperatorBench& operator=(const OperatorBench&) = delete;

  /// Collective: the time in us of the best that can be chosen, without serial.
  double quickest_us();
  /// Collective. `timeline`: not null: one more call of each method is appended to it.
  Result measure(flashoverlap::Timeline* timeline);

 private:
  using Partition = std::vector<std::int64_t>;
  struct Candidate {
    Partition partition;
    double us = 0;
  };
  struct Prepared {
    flashoverlap::Executor* executor;
    std::unique_ptr<flashoverlap::PreparedPlan> plan;
  };

  [[nodiscard]] bool gathers() const { return op_ == "ag"; }
  [[nodiscard]] int device() const { return rank_.options.device; }
  [[nodiscard]] int gemm_sms() const;
  [[nodiscard]] flashoverlap::PlanOptions base_options() const;
  [[nodiscard]] flashoverlap::OverlapPlan build(const flashoverlap::PlanOptions& options,
                                                const Partition& partition) const;
  [[nodiscard]] flashoverlap::OverlapPlan build_serial() const;
  Prepared prepare(const Partition& partition);
  std::unique_ptr<flashoverlap::Executor> make_executor(const std::string& variant);
  Prepared prepare_serial();
  void choose_gemm();
  void search_gemm();
  void take_suggested_gemm();
  [[nodiscard]] std::int64_t num_waves_of_plan() const;
  [[nodiscard]] Partition by_default(std::int64_t waves) const;
  flashoverlap::BandwidthCurve measure_curve();
  double measured_us(const Partition& partition);
  /// All ranks decide by the same numbers.
  Candidate choose_partition(std::int64_t waves, const flashoverlap::BandwidthCurve& curve, Result& result);
  Candidate choose_parts();
  Candidate choose(const flashoverlap::BandwidthCurve& curve, Result& result);
  [[nodiscard]] flashoverlap::OverlapCost cost_of(std::int64_t waves, double gemm_us,
                                                  const flashoverlap::BandwidthCurve& curve);
  double predict_signal(const Result& result, const flashoverlap::BandwidthCurve& curve);
  double predict_gather(const Result& result, const flashoverlap::BandwidthCurve& curve);

  void execute(const Prepared& plan, flashoverlap::Mode mode, flashoverlap::Timeline* timeline = nullptr);
  double batch(const Prepared& plan, flashoverlap::Mode mode, int calls);
  double slowest_us(int calls);
  Times time_all(const Prepared& serial, const Prepared& overlapped, const Prepared& defaulted);
  unsigned compare(const Prepared& serial, const Prepared& overlapped);
  void trace(const Prepared& serial, const Prepared& overlapped, flashoverlap::Timeline* timeline);

  flashoverlap::gpu_test::Rank& rank_;
  const OperatorSettings& settings_;
  std::string op_;
  Shape shape_;
  std::int64_t output_rows_;
  cudaStream_t stream_;
  flashoverlap::cuda::DeviceBuffer a_, b_, out_, reference_, weight_, residual_;
  flashoverlap::Operands operands_;
  flashoverlap::cuda::Event begin_, end_;
  const flashoverlap::cuda::SignalGemmVariant* variant_ = nullptr;
  flashoverlap::PlanOptions options_;
  std::shared_ptr<flashoverlap::Communicator> serial_communicator_;
  std::unique_ptr<flashoverlap::Executor> executor_, serial_executor_;
};

/// "1,2,3"
std::string text_of(const std::vector<std::int64_t>& values);
/// One JSON object and a newline.
void append_json(std::ostream& out, const Result& result, const std::string& communicator);

}  // namespace bench
