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
  GpuRank(std::shared_ptr<Communicator> communicator, const CudaOptions& cuda_options,
          const ProblemOptions& options, const Routing& routing, const Inputs& inputs)
      : device_(cuda_options.device),
        scope_(device_),
        context_(communicator, make_cuda_executor(communicator, cuda_options)),
        stream_(make_cuda_stream(cuda_options)),
        op_(make_operator(context_, options, routing)),
        out_(op_->output_rows(), options.n, options.dtype) {
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
    out_.poison();
    write_to(device_, device_out_, out_);
    op_->run(operands_, method, Mode::kRun, timeline);
    read_from(device_out_, out_, *stream_);
    return out_;
  }

  /// Microseconds of one call, see BatchTimer.
  double time(Method method, Mode mode) {
    constexpr int kCalls = 5;
    return timer_.time_us(context_.communicator(), *stream_, kCalls,
                          [&] { op_->run(operands_, method, mode, nullptr); });
  }

  [[nodiscard]] const OverlapPlan& plan() const { return op_->plan(); }
  [[nodiscard]] const GemmOperator& op() const { return *op_; }

 private:
  int device_;
  cuda::DeviceScope scope_;
  cuda::DeviceBuffer a_, b_, device_out_;
  Context context_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<GemmOperator> op_;
  Matrix out_;
  Operands operands_;
  BatchTimer timer_;
};

void measure_rank(const std::shared_ptr<Communicator>& communicator, const CudaOptions& cuda_options,
                  const RunOptions& options, SharedRun& shared) {
  const int rank = communicator->rank();
  GpuRank run(communicator, cuda_options, options.problem, shared.routing, shared.inputs[as_index(rank)]);
  shared.result.plans[as_index(rank)] = run.plan();
  if (rank == 0) {
    const SumRounding sums = communicator->name() == "nccl" ? SumRounding::kEverySum : SumRounding::kOnce;
    shared.check = std::make_unique<ResultCheck>(options.problem, shared.routing, shared.inputs,
                                                 run.plan().grid.tile_m(), sums);
  }
  (void)communicator->exchange(std::uint64_t{0}, {.operation = "making the reference"});
  run_checked(run, rank, shared, false);
  std::vector<double> gemm, communication, serial, overlap;
  for (std::int64_t i = 0; i < options.iterations; ++i) {
    serial.push_back(run.time(Method::kSerial, Mode::kRun));
    overlap.push_back(run.time(Method::kOverlap, Mode::kRun));
    gemm.push_back(run.time(Method::kSerial, Mode::kGemmOnly));
    communication.push_back(run.time(Method::kSerial, Mode::kCommunicationOnly));
  }
  run_checked(run, rank, shared, true);
  if (rank != 0) return;
  shared.result.times = {.gemm_us = core::median(gemm),
                         .communication_us = core::median(communication),
                         .serial_us = core::median(serial),
                         .overlap_us = core::median(overlap),
                         .serial_exposed_us = exposed_us(serial, gemm),
                         .overlap_exposed_us = exposed_us(overlap, gemm)};
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
                measure_rank(communicator, cuda_options, options, shared);
              });
  });
  shared.result.backend = "cuda";
  shared.result.communicator = ranks.text();
  return std::move(shared.result);
}

}  // namespace flashoverlap::cli
