#include "cuda_place.h"

#include <flashoverlap/in_process.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "cuda/check.h"
#include "cuda/cublas_gemm.h"
#include "cuda/rank_placement.h"
#include "cuda/sm_partition.h"
#include "softmax.h"

namespace flashoverlap::layers {
namespace {

using cuda::CublasGemm;
using cuda::DeviceBuffer;

constexpr std::int64_t kVector = 8;  // elements of 16 bits in 16 bytes

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// What a rank's calls outside the operators run with.
struct Device {
  int index = 0;
  int sms = 0;  // that cuBLAS may use
  cudaStream_t stream = nullptr;
};

/// Attention in blocks of queries, so that its scores take a bounded piece of memory: scores = q · k^T of all
/// heads, in float32; weights = softmax(scores), in 16 bits; out = weights · v.
class CudaAttention final : public Attention {
 public:
  CudaAttention(const Device& device, const AttentionShape& own, const Matrix& qkv, const Matrix& out)
      : device_(device),
        own_(own),
        qkv_(qkv),
        out_(out),
        ld_(ceil_div(own.tokens, kVector) * kVector),
        block_(block_of(own, ld_)),
        scores_(device.index, own.heads * block_ * ld_ * kScoreBytes, "scores of attention"),
        weights_(device.index, own.heads * block_ * ld_ * size_of(qkv.place().dtype()),
                 "weights of attention"),
        workspace_(device.index, CublasGemm::kWorkspaceBytes, "cuBLAS") {
    run(0, own.tokens);  // loads cuBLAS's kernels, which would hang behind a stream that waits
    FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(device.stream));
  }

  void run(std::int64_t first, std::int64_t count) override {
    if (own_.heads == 0) return;
    const cuda::DeviceScope scope(device_.index);
    for (std::int64_t begin = first; begin < first + count; begin += block_)
      attend(begin, std::min(block_, first + count - begin));
  }

 private:
  static constexpr std::int64_t kScoreBytes = sizeof(float);

  /// The two products of a block.
  struct Gemms {
    std::unique_ptr<CublasGemm> scores;
    std::unique_ptr<CublasGemm> out;
  };

  /// Equal blocks, as few as fit.
  static std::int64_t block_of(const AttentionShape& own, std::int64_t ld) {
    constexpr std::int64_t kMostBytes = 512LL << 20;
    const std::int64_t bytes_of_query = std::max<std::int64_t>(1, own.heads * ld * (kScoreBytes + 2));
    const std::int64_t most = std::max<std::int64_t>(1, kMostBytes / bytes_of_query);
    const std::int64_t num_blocks = std::max<std::int64_t>(1, ceil_div(own.tokens, most));
    return std::max<std::int64_t>(1, ceil_div(own.tokens, num_blocks));
  }

  void attend(std::int64_t first, std::int64_t queries) {
    const std::int64_t size = own_.head_size;
    const Gemms& gemms = gemms_of(queries);
    gemms.scores->launch(at(qkv_, first, 0), at(qkv_, 0, size), scores_.data(), device_.stream);
    launch_softmax({.dtype = qkv_.place().dtype(),
                    .rows = own_.heads * queries,
                    .cols = own_.tokens,
                    .ld = ld_,
                    .scale = 1 / std::sqrt(static_cast<float>(size)),
                    .scores = static_cast<const float*>(scores_.data()),
                    .weights = weights_.data()},
                   device_.stream);
    gemms.out->launch(weights_.data(), at(qkv_, 0, 2 * size), at(out_, first, 0), device_.stream);
  }

  const Gemms& gemms_of(std::int64_t queries) {
    Gemms& gemms = gemms_[queries];
    if (gemms.scores != nullptr) return gemms;
    const std::int64_t size = own_.head_size;
    const DType dtype = qkv_.place().dtype();
    const auto make = [&](const CublasGemm::Shape& shape) {
      return std::make_unique<CublasGemm>(device_.index, dtype, shape, device_.sms, workspace_.data());
    };
    // q, k and v of a head lie side by side, those of the next head behind them.
    gemms.scores = make({.m = queries,
                         .n = own_.tokens,
                         .k = size,
                         .lda = qkv_.cols(),
                         .ldb = qkv_.cols(),
                         .ldd = ld_,
                         .type_of_d = DType::kFloat32,
                         .batch = own_.heads,
                         .stride_a = 3 * size,
                         .stride_b = 3 * size,
                         .stride_d = queries * ld_,
                         .alignment_bytes = alignment_of_heads()});
    gemms.out = make({.m = queries,
                      .n = size,
                      .k = own_.tokens,
                      .lda = ld_,
                      .ldb = qkv_.cols(),
                      .ldd = out_.cols(),
                      .type_of_d = dtype,
                      .b_is_transposed = false,
                      .batch = own_.heads,
                      .stride_a = queries * ld_,
                      .stride_b = 3 * size,
                      .stride_d = size,
                      .alignment_bytes = alignment_of_heads()});
    return gemms;
  }

  /// Where k and v begin.
  [[nodiscard]] std::int64_t alignment_of_heads() const {
    constexpr std::int64_t kMost = 256;  // what cuBLAS asks for at most
    const std::int64_t bytes = own_.head_size * size_of(qkv_.place().dtype());
    return std::min(kMost, bytes & -bytes);  // the largest power of two that divides it
  }

  static void* at(const Matrix& matrix, std::int64_t row, std::int64_t col) {
    const std::int64_t element = row * matrix.cols() + col;
    return static_cast<char*>(matrix.data()) + element * size_of(matrix.place().dtype());
  }

  Device device_;
  AttentionShape own_;
  const Matrix& qkv_;
  const Matrix& out_;
  std::int64_t ld_;     // of scores and weights
  std::int64_t block_;  // queries
  DeviceBuffer scores_;
  DeviceBuffer weights_;
  DeviceBuffer workspace_;
  std::map<std::int64_t, Gemms> gemms_;  // by number of queries
};

class CudaPlace final : public Place {
 public:
  CudaPlace(Context& context, const CudaOptions& options, Stream& stream, DType dtype,
            cuda::DeviceMemory memory)
      : Place(context, dtype, native_handle(stream)),
        stream_(stream),
        device_{.index = options.device,
                .sms = options.partition.compute == nullptr ? cuda::num_sms(options.device)
                                                            : options.partition.compute->num_sms(),
                .stream = static_cast<cudaStream_t>(native_handle(stream))},
        memory_(memory) {
    const cuda::DeviceScope scope(device_.index);
    load_softmax_kernels();
  }

  [[nodiscard]] std::shared_ptr<void> allocate(std::int64_t bytes) override {
    const auto buffer = std::make_shared<DeviceBuffer>(device_.index, bytes, "a matrix of a layer", memory_);
    return {buffer, buffer->data()};
  }

  void write(void* to, const void* from, std::int64_t bytes) override {
    stream_.synchronize();
    cuda::upload(device_.index, to, from, static_cast<std::size_t>(bytes));
  }

  void read(const void* from, void* to, std::int64_t bytes) override {
    stream_.synchronize();
    if (bytes == 0) return;
    const cuda::DeviceScope scope(device_.index);
    FLASHOVERLAP_CUDA_CHECK(
        cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, device_.stream));
    stream_.synchronize();
  }

  void poison(void* to, std::int64_t bytes) override {
    constexpr int kNaN = 0xFF;  // in both types of 16 bits
    if (bytes == 0) return;
    const cuda::DeviceScope scope(device_.index);
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(to, kNaN, static_cast<std::size_t>(bytes), device_.stream));
  }

  [[nodiscard]] std::unique_ptr<Attention> make_attention(const AttentionShape& own, const Matrix& qkv,
                                                          const Matrix& out) override {
    auto attention = std::make_unique<CudaAttention>(device_, own, qkv, out);
    // Until all ranks have loaded their kernels, none may put one onto a shared GPU that waits for another
    // rank.
    (void)context().communicator().exchange(std::uint64_t{0}, {.operation = "attention of a layer"});
    return attention;
  }

 private:
  Stream& stream_;
  Device device_;
  cuda::DeviceMemory memory_;
};

}  // namespace

std::unique_ptr<Place> make_cuda_place(Context& context, const CudaOptions& options, Stream& stream,
                                       DType dtype, cuda::DeviceMemory memory) {
  return std::make_unique<CudaPlace>(context, options, stream, dtype, memory);
}

void run_on_gpus(int ranks, const std::function<void(Place&)>& on_rank) {
  constexpr int kCommunicationSms = 16;
  cuda::prepare_environment();
  const cuda::RankPlacement placement =
      cuda::place_ranks(cuda::default_devices(ranks), kCommunicationSms, cuda::Transport::kLocal);
  const cuda::RankCommunicators communicators(placement, {});
  run_ranks(ranks, {}, [&](const std::shared_ptr<Communicator>& control) {
    communicators.run(
        control, [&](const std::shared_ptr<Communicator>& communicator, const CudaOptions& options) {
          Context context(communicator, make_cuda_executor(communicator, options));
          const std::unique_ptr<Stream> stream = make_cuda_stream(options);
          const std::unique_ptr<Place> place = make_cuda_place(context, options, *stream, DType::kBFloat16);
          on_rank(*place);
        });
  });
}

}  // namespace flashoverlap::layers
