#include "gpu_run.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>

#include "checked_run.h"
#include "core/fail.h"
#include "core/median.h"
#include "cuda/check.h"
#include "cuda/device.h"
#include "flashoverlap/cuda_context.h"
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
        out_(op_->output_rows(), options.n, options.dtype),
        begin_(true),
        end_(true) {
    const auto copy = [&](const Matrix& matrix) {
      const std::int64_t bytes = matrix.rows() * matrix.cols() * size_of(matrix.dtype());
      cuda::DeviceBuffer buffer(device_, bytes, "a matrix of flashoverlap run");
      cuda::upload(device_, buffer.data(), matrix.data(), as_index(bytes));
      return buffer;
    };
    a_ = copy(inputs.a);
    b_ = copy(inputs.b);
    device_out_ = copy(out_);
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
    const std::size_t bytes = as_index(out_.rows() * out_.cols() * size_of(out_.dtype()));
    cuda::upload(device_, device_out_.data(), out_.data(), bytes);
    op_->run(operands_, method, Mode::kRun, timeline);
    stream_->synchronize();
    if (bytes > 0) {
      FLASHOVERLAP_CUDA_CHECK(
          cudaMemcpyAsync(out_.data(), device_out_.data(), bytes, cudaMemcpyDeviceToHost, stream()));
      stream_->synchronize();
    }
    return out_;
  }

  /// Microseconds of one call, the slowest rank's, over a batch of calls back to back; the same on every
  /// rank.
  double time(Method method, Mode mode) {
    constexpr int kCalls = 5;
    Communicator& communicator = context_.communicator();
    (void)communicator.exchange(std::uint64_t{0}, {.operation = "start of a measured batch"});
    begin_.record(stream());
    for (int i = 0; i < kCalls; ++i) op_->run(operands_, method, mode, nullptr);
    end_.record(stream());
    stream_->synchronize();
    float ms = 0;
    FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
    const double us = static_cast<double>(ms) * 1e3 / kCalls;
    double slowest = 0;
    for (const std::uint64_t bits :
         communicator.exchange(std::bit_cast<std::uint64_t>(us), {.operation = "end of a measured batch"})) {
      slowest = std::max(slowest, std::bit_cast<double>(bits));
    }
    return slowest;
  }

  [[nodiscard]] const OverlapPlan& plan() const { return op_->plan(); }
  [[nodiscard]] const GemmOperator& op() const { return *op_; }

 private:
  [[nodiscard]] cudaStream_t stream() const { return static_cast<cudaStream_t>(operands_.stream); }

  int device_;
  cuda::DeviceScope scope_;
  cuda::DeviceBuffer a_, b_, device_out_;
  Context context_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<GemmOperator> op_;
  Matrix out_;
  Operands operands_;
  cuda::Event begin_, end_;
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
  if (problem.dtype == DType::kFloat32) {
    core::fail(ErrorKind::kUnsupported, "--backend cuda computes bf16 and f16, not f32; add --dtype bf16");
  }
  require_memory(memory_estimate(problem));
  const LinkModel link = options.link_is_auto ? LinkModel{} : options.link;
  const GpuRanks ranks(problem.ranks, gpu, link);
  SharedRun shared;
  shared.routing = problem.op == Op::kGemmAllToAll ? make_routing(problem) : Routing{};
  for (int rank = 0; rank < problem.ranks; ++rank) shared.inputs.push_back(make_inputs(problem, rank));
  shared.result.plans.resize(as_index(problem.ranks));
  shared.result.link = link;
  run_problem(problem, {}, [&](const std::shared_ptr<Communicator>& control) {
    const std::shared_ptr<Communicator> communicator = ranks.connect(control);
    try {
      measure_rank(communicator, ranks.options_of(control->rank()), options, shared);
    } catch (const std::exception& error) {
      communicator->abort(error.what());
      throw;
    }
  });
  shared.result.backend = "cuda";
  shared.result.communicator = ranks.text();
  return std::move(shared.result);
}

}  // namespace flashoverlap::cli
