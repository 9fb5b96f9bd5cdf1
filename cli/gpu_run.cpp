#include "gpu_run.h"

#include "checked_run.h"
#include "core/median.h"
#include "cuda/device.h"
#include "flashoverlap/cuda_context.h"
#include "gpu_measure.h"
#include "gpu_ranks.h"
#include "paced_run.h"

namespace flashoverlap::cli {
namespace {

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// One rank's operator with its matrices on its device.
class GpuRank {
 public:
  GpuRank(const std::shared_ptr<Communicator>& communicator, const CudaOptions& cuda_options,
          const ProblemOptions& options, const Routing& routing, const Inputs& inputs, bool decomposed)
      : device_(cuda_options.device),
        scope_(device_),
        communicator_(*communicator),
        stream_(make_cuda_stream(cuda_options)),
        ops_(communicator, cuda_options, decomposed,
             [&](Context& context) { return make_operator(context, options, routing); }),
        out_(ops_.persistent().output_rows(), options.n, options.dtype) {
    a_ = on_device(device_, inputs.a);
    b_ = on_device(device_, inputs.b);
    device_out_ = on_device(device_, out_);
    operands_.a = a_.data();
    operands_.lda = options.k;
    operands_.b = b_.data();
    operands_.ldb = options.k;
    operands_.out = device_out_.data();
    operands_.ldo = options.n;
    operands_.stream = native_handle(*stream_);
  }

  /// Runs on a poisoned output and returns it.
  const Matrix& run_afresh(Method method, Timeline* timeline) {
    return run_afresh(ops_.persistent(), method, timeline);
  }
  const Matrix& run_decomposed_afresh() { return run_afresh(ops_.decomposed(), Method::kOverlap, nullptr); }

  double time(Method method, Mode mode) { return time(ops_.persistent(), method, mode); }
  double time_decomposed() { return time(ops_.decomposed(), Method::kOverlap, Mode::kRun); }

  [[nodiscard]] bool has_decomposed() const { return ops_.has_decomposed(); }
  [[nodiscard]] const OverlapPlan& plan() const { return ops_.persistent().plan(); }
  [[nodiscard]] const GemmOperator& op() const { return ops_.persistent(); }

 private:
  const Matrix& run_afresh(GemmOperator& op, Method method, Timeline* timeline) {
    out_.poison();
    write_to(device_, device_out_, out_);
    op.run(operands_, method, Mode::kRun, timeline);
    read_from(device_out_, out_, *stream_);
    return out_;
  }

  /// Microseconds of one call, see BatchTimer.
  double time(GemmOperator& op, Method method, Mode mode) {
    constexpr int kCalls = 5;
    return timer_.time_us(communicator_, *stream_, kCalls, [&] { op.run(operands_, method, mode, nullptr); });
  }

  int device_;
  cuda::DeviceScope scope_;
  cuda::DeviceBuffer a_, b_, device_out_;
  Communicator& communicator_;
  std::unique_ptr<Stream> stream_;
  OperatorForms ops_;
  Matrix out_;
  Operands operands_;
  BatchTimer timer_;
};

void check_decomposed(GpuRank& run, int rank, SharedRun& shared) {
  if (!run.has_decomposed()) return;
  CheckResult check = shared.check->check(rank, run.run_decomposed_afresh());
  if (!check.wrong.empty()) check.wrong = "decomposed: " + check.wrong;
  const std::lock_guard lock(shared.mutex);
  shared.result.check.merge(check);
}

void measure_rank(const std::shared_ptr<Communicator>& communicator, const CudaOptions& cuda_options,
                  const RunOptions& options, bool decomposed, SharedRun& shared) {
  const int rank = communicator->rank();
  GpuRank run(communicator, cuda_options, options.problem, shared.routing, shared.inputs[as_index(rank)],
              decomposed);
  shared.result.plans[as_index(rank)] = run.plan();
  if (rank == 0) {
    const SumRounding sums = communicator->name() == "nccl" ? SumRounding::kEverySum : SumRounding::kOnce;
    shared.check = std::make_unique<ResultCheck>(options.problem, shared.routing, shared.inputs,
                                                 run.plan().grid.tile_m(), sums);
  }
  (void)communicator->exchange(std::uint64_t{0}, {.operation = "making the reference"});
  const bool has_sliced = options.problem.has_sliced();
  run_checked(run, rank, shared, false, has_sliced);
  check_decomposed(run, rank, shared);
  std::vector<double> gemm, communication, serial, sliced, overlap, decomposed_runs;
  for (std::int64_t i = 0; i < options.iterations; ++i) {
    serial.push_back(run.time(Method::kSerial, Mode::kRun));
    if (has_sliced) sliced.push_back(run.time(Method::kSliced, Mode::kRun));
    overlap.push_back(run.time(Method::kOverlap, Mode::kRun));
    if (decomposed) decomposed_runs.push_back(run.time_decomposed());
    gemm.push_back(run.time(Method::kSerial, Mode::kGemmOnly));
    communication.push_back(run.time(Method::kSerial, Mode::kCommunicationOnly));
  }
  run_checked(run, rank, shared, true, has_sliced);
  if (rank != 0) return;
  shared.result.times = {.gemm_us = core::median(gemm),
                         .communication_us = core::median(communication),
                         .serial_us = core::median(serial),
                         .overlap_us = core::median(overlap),
                         .serial_exposed_us = exposed_us(serial, gemm),
                         .overlap_exposed_us = exposed_us(overlap, gemm)};
  Times& times = shared.result.times;
  if (has_sliced) {
    times.sliced_us = core::median(sliced);
    times.sliced_exposed_us = exposed_us(sliced, gemm);
  }
  if (decomposed) {
    times.decomposed_us = core::median(decomposed_runs);
    times.decomposed_exposed_us = exposed_us(decomposed_runs, gemm);
  }
  shared.result.method = method_of(options.problem, run.op());
}

}  // namespace

RunResult measure_on_gpus(const RunOptions& options, const GpuOptions& gpu) {
  const ProblemOptions& problem = options.problem;
  require_gpu_type(problem.dtype);
  require_memory(memory_estimate(problem));
  const LinkModel link = options.link_is_auto ? LinkModel{} : options.link;
  const GpuRanks ranks(problem.ranks, gpu, link);
  SharedRun shared;
  shared.routing = problem.op == Op::kGemmAllToAll ? make_routing(problem) : Routing{};
  for (int rank = 0; rank < problem.ranks; ++rank) shared.inputs.push_back(make_inputs(problem, rank));
  shared.result.plans.resize(as_index(problem.ranks));
  shared.result.link = link;
  run_problem(problem, {}, [&](const std::shared_ptr<Communicator>& control) {
    ranks.run(control,
              [&](const std::shared_ptr<Communicator>& communicator, const CudaOptions& cuda_options) {
                measure_rank(communicator, cuda_options, options, gpu.decomposed, shared);
              });
  });
  shared.result.backend = "cuda";
  shared.result.communicator = ranks.text();
  return std::move(shared.result);
}

}  // namespace flashoverlap::cli
