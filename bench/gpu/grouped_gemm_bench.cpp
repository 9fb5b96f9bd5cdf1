// The GEMM over a rank's experts, as the layer of experts launches it, against cuBLAS on one GEMM of the same
// total size, whose rows all multiply with one matrix: what there would be without experts. bf16, one GPU.
//   grouped_gemm_bench [--experts 64] [--n 2048] [--k 4096] [--rows 64,128,256,512,1024] [--rounds 9]
// For every number of rows of an expert, and every tile size: whether samples of the product are right, the
// time, and the ideal's time divided by it. Tiles end with their expert's rows: 64 rows of a tile of 128 cost
// a whole one.
#include <cstring>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include "flashoverlap/cuda_context.h"
#include "flashoverlap/moe_plan.h"
#include "gemm_choice.h"
#include "sm_partition.h"
#include "test_matrices.h"
#include "timing.h"

namespace {

using namespace flashoverlap;
using TileSize = std::pair<std::int64_t, std::int64_t>;
constexpr auto kType = bench::Element16::kBf16;

struct Options {
  int experts = 64;
  int n = 2048;
  int k = 4096;
  std::vector<int> rows = {64, 128, 256, 512, 1024};
  int rounds = 9;
};

template <class T>
struct Buffer {
  explicit Buffer(std::int64_t count) {
    BENCH_CUDA(cudaMalloc(&data, static_cast<std::size_t>(count) * sizeof(T)));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  T* data = nullptr;
};

// The second GEMM of the only rank: results lie where its send rows do.
OverlapPlan plan_of(const Options& options, int rows, const TileSize& tile) {
  MoePlanOptions plan;
  plan.dtype = DType::kBFloat16;
  plan.num_experts = options.experts;
  plan.tile_m = tile.first;
  plan.tile_n = tile.second;
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(options.experts), rows);
  return plan_moe_combine(plan, {1, options.experts, counts}, options.n, options.k);
}

std::set<TileSize> tile_sizes() {
  std::set<TileSize> sizes;
  for (const cuda::SignalGemmVariant* variant : cuda::variants_for(0, DType::kBFloat16))
    sizes.emplace(variant->tile_rows, variant->tile_cols);
  return sizes;
}

class RowsBench {
 public:
  RowsBench(const Options& options, int rows, cublasLtHandle_t handle)
      : options_(options),
        rows_(rows),
        m_(options.experts * rows),
        a_(1LL * m_ * options.k),
        b_(1LL * options.experts * options.n * options.k),
        d_(1LL * m_ * options.n),
        workspace_(kWorkspaceBytes),
        errors_(1),
        ideal_(handle, CUDA_R_16BF, m_, options.n, options.k, cuda::num_sms(0), a_.data, b_.data, d_.data,
               workspace_.data, kWorkspaceBytes) {
    BENCH_CUDA(cudaStreamCreate(&stream_));
    bench::fill_random(kType, a_.data, 1LL * m_ * options.k, 1, stream_);
    bench::fill_random(kType, b_.data, 1LL * options.experts * options.n * options.k, 2, stream_);
    choose_ideal();
  }
  ~RowsBench() { cudaStreamDestroy(stream_); }
  RowsBench(const RowsBench&) = delete;
  RowsBench& operator=(const RowsBench&) = delete;

  void run(Executor& executor, const TileSize& tile) {
    const auto prepared = executor.prepare(plan_of(options_, rows_, tile));
    Operands operands;
    operands.a = a_.data;
    operands.b = b_.data;
    operands.out = d_.data;
    operands.lda = operands.ldb = options_.k;
    operands.ldo = options_.n;
    operands.stream = stream_;
    const auto grouped = [&](cudaStream_t) { executor.execute(*prepared, operands, Mode::kRun, nullptr); };
    const unsigned wrong = count_errors(grouped);
    bench::Timer timer(stream_);
    const std::vector<double> us =
        timer.compare_us({grouped, [&](cudaStream_t on) { ideal_.launch(on); }}, options_.rounds, kPauseMs);
    const double tflops = 2.0 * m_ * options_.n * options_.k / us[0] / 1e6;
    std::printf("%6d %8d  %4lldx%-4lld  %9.1f  %9.1f  %6.3f  %7.0f  %s\n", rows_, m_,
                static_cast<long long>(tile.first), static_cast<long long>(tile.second), us[0], us[1],
                us[1] / us[0], tflops, wrong == 0 ? "OK" : "WRONG");
    is_right_ = is_right_ && wrong == 0;
  }
  [[nodiscard]] bool is_right() const { return is_right_; }

 private:
  static constexpr std::size_t kWorkspaceBytes = 64 << 20;
  static constexpr int kPauseMs = 10;

  void choose_ideal() {
    bench::Timer timer(stream_);
    double best_us = 1e30;
    std::size_t best = 0;
    for (std::size_t algorithm = 0; algorithm < ideal_.num_algorithms(); ++algorithm) {
      ideal_.choose(algorithm);
      const bench::Launch launch = [&](cudaStream_t on) { ideal_.launch(on); };
      (void)timer.batch_us(launch, 2);
      const double us = timer.batch_us(launch, 5);
      if (us < best_us) {
        best_us = us;
        best = algorithm;
      }
    }
    ideal_.choose(best);
  }

  // Of samples of each expert's product; of a poisoned output.
  unsigned count_errors(const bench::Launch& grouped) {
    BENCH_CUDA(cudaMemsetAsync(errors_.data, 0, sizeof(unsigned), stream_));
    BENCH_CUDA(cudaMemsetAsync(d_.data, 0xFF, static_cast<std::size_t>(2LL * m_ * options_.n), stream_));
    grouped(stream_);
    for (std::int64_t e = 0; e < options_.experts; ++e) {
      const std::int64_t row = e * rows_;
      // As signal_gemm_bench.
      bench::check_samples(kType, a_.data + row * options_.k, b_.data + e * options_.n * options_.k, rows_,
                           options_.n, options_.k, d_.data + row * options_.n, 1.0 / 128,
                           1e-4 * options_.k / 64, errors_.data, stream_);
    }
    unsigned errors = 0;
    BENCH_CUDA(cudaMemcpyAsync(&errors, errors_.data, sizeof errors, cudaMemcpyDeviceToHost, stream_));
    BENCH_CUDA(cudaStreamSynchronize(stream_));
    return errors;
  }

  const Options& options_;
  int rows_;
  int m_;
  Buffer<std::uint16_t> a_, b_, d_;
  Buffer<char> workspace_;
  Buffer<unsigned> errors_;
  bench::CublasGemm ideal_;
  cudaStream_t stream_{};
  bool is_right_ = true;
};

std::vector<int> parse_list(const char* text) {
  std::vector<int> values;
  std::stringstream words(text);
  for (std::string word; std::getline(words, word, ',');) values.push_back(std::atoi(word.c_str()));
  return values;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    const std::vector<int> values = i + 1 < argc ? parse_list(argv[i + 1]) : std::vector<int>{};
    const bool is_bad =
        values.empty() || std::any_of(values.begin(), values.end(), [](int v) { return v < 1; });
    if (!is_bad && name == "--rows") {
      options.rows = values;
    } else if (!is_bad && name == "--experts") {
      options.experts = values.front();
    } else if (!is_bad && name == "--n") {
      options.n = values.front();
    } else if (!is_bad && name == "--k") {
      options.k = values.front();
    } else if (!is_bad && name == "--rounds") {
      options.rounds = values.front();
    } else {
      std::fprintf(stderr, "grouped_gemm_bench: %s is not an option, or has no number >= 1\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (cuda_device_count() == 0) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  cublasLtHandle_t handle{};
  BENCH_CUBLAS(cublasLtCreate(&handle));
  bool is_right = true;
  std::printf("# %d experts, n %d, k %d, bf16; ideal: cuBLAS, one GEMM with as many rows\n", options.experts,
              options.n, options.k);
  std::printf("# rows     of all   tile     grouped us   ideal us  ideal/grouped  TFLOP/s\n");
  const auto communicators = make_local_gpu_communicators({0});
  CudaOptions all_sms;
  all_sms.communication_sms = 0;
  const auto executor = make_cuda_executor(communicators.front(), all_sms);
  for (const int rows : options.rows) {
    RowsBench of_rows(options, rows, handle);
    for (const TileSize& tile : tile_sizes()) of_rows.run(*executor, tile);
    is_right = is_right && of_rows.is_right();
  }
  BENCH_CUBLAS(cublasLtDestroy(handle));
  return is_right ? 0 : 1;
}
