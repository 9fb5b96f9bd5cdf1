// Operands::make_rows on the GPU: A is made in the caller's stream, slice by slice, while what was made
// before is multiplied and sent.
#include <algorithm>
#include <memory>

#include "any_operator.h"
#include "check.h"
#include "gpu_matrix.h"
#include "gpu_random.h"
#include "gpu_ranks.h"
#include "gpu_test.h"
#include "plan/row_runs.h"

namespace flashoverlap::gpu_test {
namespace {

using Runs = std::vector<plan::RowRun>;

using Kind = OperatorKind;
constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kSignal, Kind::kTailFree, Kind::kShardedWeight,
                           Kind::kHeads};

/// One rank's operator with an A that its calls make, a complete one beside it, and room for both results.
class MadeCall {
 public:
  MadeCall(Rank& rank, GemmForm form, Kind kind, const GemmOptions& options)
      : rank_(rank),
        op_(make_any(rank.context_of(form), kind, options, {}, BaselineOptions{2})),
        whole_(op_->plan().grid.rows(), options.k, options.k, options.dtype),
        a_(whole_.rows(), options.k, options.k + 8, options.dtype),
        b_(options.n, options.k, options.k, options.dtype),
        expected_(op_->plan().output_rows, op_->plan().output_cols, op_->plan().output_cols, options.dtype),
        out_(expected_.rows(), expected_.cols(), expected_.cols(), options.dtype) {
    whole_.fill(known_a(rank.rank, whole_.rows(), options.k));
    b_.fill(known_b(kind == Kind::kShardedWeight ? 5 : rank.rank, options.n, options.k));
  }

  /// By a call that makes A, from poison, and by one whose A is complete.
  void compare(Method method) {
    (*op_)(operands(whole_, expected_), method);
    made_.clear();
    a_.poison();
    out_.poison();
    run(method, Mode::kRun);
    rank_.stream->synchronize();
    GPU_EXPECT(out_.read() == expected_.read(), text(method) << ": the results differ");
    expect_each_once(method);
  }

  void run(Method method, Mode mode, Timeline* timeline = nullptr) {
    Operands own = operands(a_, out_);
    own.make_rows = [this](std::int64_t first, std::int64_t count) { make(first, count); };
    op_->run(own, method, mode, timeline);
  }

  void expect_each_once(Method method) const {
    Runs runs = made_;
    std::ranges::sort(runs, {}, &plan::RowRun::first);
    std::int64_t next = 0;
    for (const plan::RowRun& run : runs) {
      GPU_EXPECT(run.first == next, text(method) << ": rows from " << next << " on, made from " << run.first);
      next += run.count;
    }
    GPU_EXPECT(next == a_.rows(), text(method) << ": rows to " << next << " of " << a_.rows());
  }

  [[nodiscard]] const Runs& made() const { return made_; }
  void forget() { made_.clear(); }
  [[nodiscard]] GemmOperator& op() { return *op_; }
  void use_stream(cudaStream_t stream) { stream_ = stream; }
  [[nodiscard]] cudaStream_t stream() const {
    return stream_ != nullptr ? stream_ : static_cast<cudaStream_t>(rank_.native_stream());
  }

 private:
  [[nodiscard]] Operands operands(const DeviceMatrix& a, const DeviceMatrix& out) const {
    return {.a = a.data(),
            .lda = a.ld(),
            .b = b_.data(),
            .ldb = b_.ld(),
            .out = out.data(),
            .ldo = out.ld(),
            .epilogue = {},
            .stream = stream()};
  }

  void make(std::int64_t first, std::int64_t count) {
    made_.push_back({first, count});
    const auto at = [first](const DeviceMatrix& matrix) {
      return static_cast<char*>(matrix.data()) + 2 * first * matrix.ld();
    };
    FLASHOVERLAP_CUDA_CHECK(
        cudaMemcpy2DAsync(at(a_), static_cast<std::size_t>(2 * a_.ld()), at(whole_),
                          static_cast<std::size_t>(2 * whole_.ld()), static_cast<std::size_t>(2 * a_.cols()),
                          static_cast<std::size_t>(count), cudaMemcpyDeviceToDevice, stream()));
  }

  [[nodiscard]] std::string text(Method method) const {
    return op_->plan().operation + ", method " + std::to_string(static_cast<int>(method)) + ", rank " +
           std::to_string(rank_.rank);
  }

  Rank& rank_;
  std::unique_ptr<GemmOperator> op_;
  DeviceMatrix whole_, a_, b_, expected_, out_;
  Runs made_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

GPU_TEST(make_rows_gives_the_bits_of_a_complete_a) {
  for (const int world : world_sizes()) {
    for (const CommunicatorKind communicator : kinds_for(world)) {
      Random random(140 + static_cast<std::uint64_t>(world));
      for (const GemmForm form : kForms) {
        for (const Kind kind : kKinds) {
          const GemmOptions options{.m = random.pick(1, 900),
                                    .n = random.pick(1, 500),
                                    .k = 8 * random.pick(0, 15),
                                    .dtype = DType::kFloat16};
          shared_group(world, communicator).run([&](Rank& rank) {
            MadeCall call(rank, form, kind, options);
            for (const Method method :
                 {Method::kOverlap, Method::kSerial, Method::kSliced, Method::kOverlap}) {
              if (method == Method::kSliced && kind != Kind::kTailFree) continue;
              call.compare(method);
            }
          });
        }
      }
    }
  }
}

// Slices of ranks r + 1, r + 2, …, then the own one, each in one go; alone, the product is not cut.
GPU_TEST(make_rows_follows_the_schedule) {
  const int world = world_sizes().back();
  const std::int64_t slice = 2 * 256;  // two rows of the largest tiles, so that its two parts are whole tiles
  const GemmOptions options{.m = slice * world, .n = 256, .k = 64, .dtype = DType::kFloat16};
  shared_group(world, CommunicatorKind::kLocal).run([&](Rank& rank) {
    for (const GemmForm form : kForms) {
      MadeCall call(rank, form, Kind::kTailFree, options);
      Timeline timeline;
      call.run(Method::kOverlap, Mode::kRun, &timeline);
      Runs slices;  // parts of one slice together
      for (const plan::RowRun& run : call.made()) {
        if (!slices.empty() && slices.back().first + slices.back().count == run.first &&
            run.first % slice != 0) {
          slices.back().count += run.count;
        } else {
          slices.push_back(run);
        }
      }
      Runs expected;
      for (int d = 1; d <= world; ++d) expected.push_back({slice * ((rank.rank + d) % world), slice});
      GPU_EXPECT(slices == expected, name_of(form) << ", rank " << rank.rank << ": another order");
      const auto spans = std::ranges::count_if(
          timeline.spans, [](const Span& span) { return span.name.starts_with("rows "); });
      GPU_EXPECT(spans == std::ssize(call.made()),
                 spans << " spans for " << call.made().size() << " runs of rows");
      call.forget();
      call.run(Method::kOverlap, Mode::kPlainGemm);
      GPU_EXPECT(call.made() == (Runs{{0, options.m}}), "the plain product was cut");
      call.forget();
      call.run(Method::kOverlap, Mode::kCommunicationOnly);
      GPU_EXPECT(call.made().empty(), "rows were made for the communication alone");
      rank.stream->synchronize();
    }
  });
}

// A stream that is not on the rank's SMs: the GEMM is in another one then.
GPU_TEST(make_rows_in_a_stream_of_the_callers) {
  const int world = world_sizes().front();
  const GemmOptions options{.m = 900, .n = 300, .k = 64, .dtype = DType::kFloat16};
  for (const CommunicatorKind communicator : kinds_for(world)) {
    shared_group(world, communicator).run([&](Rank& rank) {
      cudaStream_t stream = nullptr;
      FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      for (const GemmForm form : kForms) {
        MadeCall call(rank, form, Kind::kTailFree, options);
        rank.stream->synchronize();
        call.use_stream(stream);
        for (int i = 0; i < 5; ++i) call.run(Method::kOverlap, Mode::kRun);
        FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(stream));
        call.use_stream(nullptr);
        call.compare(Method::kOverlap);
      }
      FLASHOVERLAP_CUDA_CHECK(cudaStreamDestroy(stream));
    });
  }
}

GPU_TEST(make_rows_of_what_travels_is_refused) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  shared_group(2, CommunicatorKind::kLocal).run([&](Rank& rank) {
    const GemmOptions options{.m = 256, .n = 128, .k = 64, .dtype = DType::kFloat16};
    AllGatherGemm op(*rank.context, options);
    const DeviceMatrix a(256, 64, 64, DType::kFloat16);
    const DeviceMatrix b(128, 64, 64, DType::kFloat16);
    const DeviceMatrix out(256, 128, 128, DType::kFloat16);
    Operands operands{.a = a.data(),
                      .lda = 64,
                      .b = b.data(),
                      .ldb = 64,
                      .out = out.data(),
                      .ldo = 128,
                      .epilogue = {},
                      .stream = rank.native_stream()};
    operands.make_rows = [](std::int64_t, std::int64_t) {};
    GPU_EXPECT_ERROR(op(operands), "make_rows is given, but a travels between ranks");
  });
}

// What the caller's function throws is an error on every rank; nobody waits for the slices that do not come.
GPU_TEST(make_rows_that_throws_ends_every_rank) {
  if (ranks_are_processes()) throw Skip("the ranks of other processes end with their own error");
  for (const CommunicatorKind communicator : kinds_for(2)) {
    for (const GemmForm form : kForms) {
      GroupOptions options = few_sms(communicator);
      options.timeout = std::chrono::milliseconds(3000);
      Group group(options);
      const std::vector<std::string> errors = group.run_all(
          [&](Rank& rank) {
            GemmReduceScatter op(rank.context_of(form),
                                 {.m = 1024, .n = 256, .k = 64, .dtype = DType::kFloat16},
                                 OverlapMethod::kTailFree);
            const DeviceMatrix a(1024, 64, 64, DType::kFloat16);
            const DeviceMatrix b(256, 64, 64, DType::kFloat16);
            const DeviceMatrix out(512, 256, 256, DType::kFloat16);
            Operands operands{.a = a.data(),
                              .lda = 64,
                              .b = b.data(),
                              .ldb = 64,
                              .out = out.data(),
                              .ldo = 256,
                              .epilogue = {},
                              .stream = rank.native_stream()};
            operands.make_rows = [&](std::int64_t first, std::int64_t) {
              // The first rows of its schedule: without what is computed of them no rank can end.
              if (rank.rank == 1 && first == 0) throw std::runtime_error("no such query");
            };
            op(operands);
            rank.stream->synchronize();
          },
          false);
      GPU_EXPECT(errors[1].find("no such query") != std::string::npos,
                 name_of(communicator) << ", " << name_of(form) << ": rank 1 says: " << errors[1]);
      GPU_EXPECT(!errors[0].empty(), name_of(communicator)
                                         << ", " << name_of(form) << ": rank 0 says nothing");
    }
  }
}

}  // namespace flashoverlap::gpu_test
