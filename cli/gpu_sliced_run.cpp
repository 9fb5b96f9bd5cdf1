#include "core/fail.h"
#include "cuda/device.h"
#include "flashoverlap/cuda_context.h"
#include "gpu_measure.h"
#include "gpu_ranks.h"
#include "sliced_measure.h"

/// `flashoverlap run --backend cuda` for operators whose data travels in slices.
namespace flashoverlap::cli {
namespace {

/// A matrix of the rank on its device: what it is for the sliced baseline, and for the other methods.
class DeviceInput {
 public:
  DeviceInput(int device, const Matrix& whole, const Matrix& sliced)
      : whole_(on_device(device, whole)),
        sliced_(&sliced == &whole ? cuda::DeviceBuffer() : on_device(device, sliced)),
        is_one_(&sliced == &whole) {}
  [[nodiscard]] void* data(Method method) const {
    return method == Method::kSliced && !is_one_ ? sliced_.data() : whole_.data();
  }

 private:
  cuda::DeviceBuffer whole_, sliced_;
  bool is_one_;
};

/// One rank on a GPU.
class GpuSlicedRank final : public SlicedCalls {
 public:
  GpuSlicedRank(const std::shared_ptr<Communicator>& communicator, const CudaOptions& cuda_options,
                const SlicedProblem& p, const std::vector<Inputs>& inputs, bool decomposed)
      : device_(cuda_options.device),
        scope_(device_),
        communicator_(*communicator),
        stream_(make_cuda_stream(cuda_options)),
        ops_(communicator, cuda_options, decomposed,
             [&](Context& context) { return make_sliced_operator(context, p); }),
        data_(p, inputs, static_cast<std::size_t>(communicator->rank()), ops_.persistent()),
        a_(device_, data_.a(Method::kOverlap), data_.a(Method::kSliced)),
        b_(device_, data_.b(Method::kOverlap), data_.b(Method::kSliced)),
        out_(on_device(device_, data_.out())) {}

  double time_us(Method method, Mode mode) override { return time_us(ops_.persistent(), method, mode); }

  const Matrix& run_afresh(Method method, Timeline* timeline) override {
    return run_afresh(ops_.persistent(), method, timeline);
  }

  std::optional<double> time_decomposed_us() override {
    if (!ops_.has_decomposed()) return std::nullopt;
    return time_us(ops_.decomposed(), Method::kOverlap, Mode::kRun);
  }

  const Matrix* run_decomposed_afresh() override {
    if (!ops_.has_decomposed()) return nullptr;
    return &run_afresh(ops_.decomposed(), Method::kOverlap, nullptr);
  }

  [[nodiscard]] const SlicedData& data() const override { return data_; }

 private:
  /// Of several calls back to back, see BatchTimer.
  double time_us(GemmOperator& op, Method method, Mode mode) {
    constexpr int kCalls = 5;
    return timer_.time_us(communicator_, *stream_, kCalls, [&] { run(op, method, mode, nullptr); });
  }

  const Matrix& run_afresh(GemmOperator& op, Method method, Timeline* timeline) {
    data_.out().poison();
    write_to(device_, out_, data_.out());
    // So that a timeline shows what ranks wait for that begin together.
    meet(communicator_);
    run(op, method, Mode::kRun, timeline);
    read_from(out_, data_.out(), *stream_);
    return data_.out();
  }

  void run(GemmOperator& op, Method method, Mode mode, Timeline* timeline) {
    op.run({.a = a_.data(method),
            .lda = data_.lda(),
            .b = b_.data(method),
            .ldb = data_.ldb(),
            .out = out_.data(),
            .ldo = data_.out().cols(),
            .epilogue = {},
            .stream = native_handle(*stream_)},
           method, mode, timeline);
  }

  int device_;
  cuda::DeviceScope scope_;
  Communicator& communicator_;
  std::unique_ptr<Stream> stream_;
  OperatorForms ops_;
  SlicedData data_;
  DeviceInput a_, b_;
  cuda::DeviceBuffer out_;
  BatchTimer timer_;
};

void check_problem(const SlicedProblem& p) {
  require_gpu_type(parse_dtype(p.dtype));
}

}  // namespace

SlicedResult measure_sliced_on_gpus(const SlicedProblem& p, const SlicedRun& run) {
  check_problem(p);
  const LinkModel link = run.link.is_auto ? LinkModel{} : run.link.model;
  const GpuRanks ranks(p.ranks, *run.gpu, link);
  const std::vector<Inputs> inputs = make_sliced_inputs(p);
  SharedSliced shared;
  shared.result.link = link;
  shared.result.parts.explanation = given_parts(p);
  shared.result.machine = "cuda backend, " + ranks.text();
  run_ranks(static_cast<int>(p.ranks), {}, [&](const std::shared_ptr<Communicator>& control) {
    ranks.run(control, [&](const std::shared_ptr<Communicator>& communicator, const CudaOptions& options) {
      const SumRounding sums = communicator->name() == "nccl" ? SumRounding::kEverySum : SumRounding::kOnce;
      GpuSlicedRank rank(communicator, options, p, inputs, run.gpu->decomposed);
      measure_sliced_rank(rank, control->rank(), run, sums, shared);
    });
  });
  return std::move(shared.result);
}

}  // namespace flashoverlap::cli
