// What NCCL's collectives gain from buffers that it knows: each on plain memory, on memory registered with
// ncclCommRegister, and on a symmetric window, by the size and by the SMs that a call may take.
//   nccl_buffers_bench [--ranks W] [--rounds 5]
// Rank r is a thread on device r; W is all devices when not given. bf16. A size is that of a rank's whole
// buffer (all-gather: of what it receives), and algorithm bandwidth is size / time. All but the all-to-all
// work in place, as in the GPU executor's workspace. Each case is checked, then timed with random data: the
// three kinds in turn, medians of the slowest rank's batches. A column stays empty where the NCCL found has
// no such buffers. NVLink multicast stays off.
#include <algorithm>
#include <array>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/half.h"
#include "device.h"
#include "nccl_library.h"
#include "runtime_library.h"
#include "test_matrices.h"
#include "timing.h"

#define BENCH_NCCL(call)                                                                               \
  do {                                                                                                 \
    const ncclResult_t bench_status = (call);                                                          \
    if (bench_status != ncclSuccess) {                                                                 \
      std::fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call,                           \
                   fo::cuda::nccl().error_string(bench_status), fo::cuda::nccl().last_error(nullptr)); \
      std::exit(1);                                                                                    \
    }                                                                                                  \
  } while (0)

namespace {

namespace fo = flashoverlap;
using fo::cuda::DeviceBuffer;
using fo::cuda::nccl;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::array kSizes = {1 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB, 64 * kMiB};
constexpr std::int64_t kMostBytes = kSizes.back();
constexpr std::array kMaxCtas = {4, 8, 16, 24, 0};  // 0: NCCL's own choice
constexpr std::int64_t kElementBytes = 2;
constexpr auto kType = bench::Element16::kBf16;

enum Kind { kPlain, kRegistered, kSymmetric, kNumKinds };
enum class Op { kAllReduce, kReduceScatter, kAllGather, kAllToAll };
constexpr std::array kOps = {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather, Op::kAllToAll};

const char* name_of(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "all-reduce";
    case Op::kReduceScatter:
      return "reduce-scatter";
    case Op::kAllGather:
      return "all-gather";
    case Op::kAllToAll:
      break;
  }
  return "all-to-all";
}

char* at(void* base, std::int64_t element) {
  return static_cast<char*>(base) + element * kElementBytes;
}

/// What the ranks have in common.
struct World {
  World(int size_, int rounds_)
      : size(size_), rounds(rounds_), barrier(size_), us(static_cast<std::size_t>(size_)) {}

  /// The largest of what the ranks pass. Collective.
  double max_of(int rank, double value) {
    us[static_cast<std::size_t>(rank)] = value;
    barrier.arrive_and_wait();
    const double most = *std::max_element(us.begin(), us.end());
    barrier.arrive_and_wait();
    return most;
  }

  int size;
  int rounds;
  std::barrier<> barrier;
  ncclUniqueId id{};
  std::vector<double> us;
};

/// Element i of rank r's data. Sums of 8 ranks are exact in bf16 in any order.
float value_of(int rank, std::int64_t i) {
  return static_cast<float>((i * 7 + rank * 13) % 31 - 15);
}

DeviceBuffer upload(int device, std::int64_t count, const std::function<float(std::int64_t)>& element) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = element(i);
  std::vector<std::uint16_t> halves(values.size());
  fo::core::from_float(values.data(), fo::DType::kBFloat16, halves.data(), count);
  DeviceBuffer buffer(device, count * kElementBytes, "data to check with");
  fo::cuda::upload(device, buffer.data(), halves.data(), halves.size() * sizeof halves[0]);
  return buffer;
}

/// One rank's input, and what each operation makes of it.
class Expected {
 public:
  Expected(int rank, int world) : rank_(rank), world_(world) {
    constexpr std::int64_t kCount = kMostBytes / kElementBytes;
    own_ = upload(rank, kCount, [&](std::int64_t i) { return value_of(rank, i); });
    sums_ = upload(rank, kCount, [&](std::int64_t i) {
      float sum = 0;
      for (int r = 0; r < world; ++r) sum += value_of(r, i);
      return sum;
    });
  }

  /// For buffers of `count` elements from now on.
  void set_count(std::int64_t count) {
    chunk_ = count / world_;
    const auto [place, is_new] = by_sender_.try_emplace(count);
    now_ = &place->second;
    if (!is_new) return;
    const auto sender = [this](std::int64_t i) { return static_cast<int>(i / chunk_); };
    now_->gathered = upload(rank_, count, [&](std::int64_t i) { return value_of(sender(i), i); });
    now_->exchanged = upload(
        rank_, count, [&](std::int64_t i) { return value_of(sender(i), rank_ * chunk_ + i % chunk_); });
  }

  [[nodiscard]] void* own() const { return own_.data(); }

  struct Region {
    std::int64_t begin, count;  ///< In the buffer that receives.
    const void* values;
  };
  [[nodiscard]] Region of(Op op) const {
    const std::int64_t count = chunk_ * world_;
    switch (op) {
      case Op::kAllReduce:
        return {0, count, sums_.data()};
      case Op::kReduceScatter:
        return {rank_ * chunk_, chunk_, at(sums_.data(), rank_ * chunk_)};
      case Op::kAllGather:
        return {0, count, now_->gathered.data()};
      case Op::kAllToAll:
        break;
    }
    return {0, count, now_->exchanged.data()};
  }

 private:
  int rank_;
  int world_;
  std::int64_t chunk_ = 0;
  DeviceBuffer own_, sums_;
  struct BySender {
    DeviceBuffer gathered, exchanged;
  };
  std::map<std::int64_t, BySender> by_sender_;
  BySender* now_ = nullptr;
};

/// What an operation sends and receives (the all-to-all only), of one kind.
struct Buffer {
  void* send = nullptr;
  void* receive = nullptr;
};

/// One rank's communicator with buffers of each kind that there is.
class Rank {
 public:
  Rank(World& world, int rank, int max_ctas) : world_(world), rank_(rank) {
    if (rank == 0) BENCH_NCCL(nccl().get_unique_id(&world.id));
    world.barrier.arrive_and_wait();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (max_ctas > 0) config.maxCTAs = max_ctas;
    BENCH_NCCL(nccl().comm_init_rank_config(&comm_, world.size, world.id, rank, &config));
    BENCH_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    plain_ = DeviceBuffer(rank, 2 * kMostBytes, "plain buffers");
    buffers_[kPlain] = split(plain_.data());
    make_registered();
    make_symmetric();
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() {
    BENCH_CUDA(cudaStreamSynchronize(stream_));
    // Freeing may wait for all devices that reach the memory.
    world_.barrier.arrive_and_wait();
    if (window_ != nullptr) BENCH_NCCL(nccl().comm_window_deregister(comm_, window_));
    if (handle_ != nullptr) BENCH_NCCL(nccl().comm_deregister(comm_, handle_));
    for (void* const memory : allocated_) BENCH_NCCL(nccl().mem_free(memory));
    BENCH_NCCL(nccl().comm_destroy(comm_));
    BENCH_CUDA(cudaStreamDestroy(stream_));
  }

  [[nodiscard]] const std::optional<Buffer>& buffer(Kind kind) const { return buffers_[kind]; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  void issue(Op op, const Buffer& buffer, std::int64_t count) const {
    const auto chunk = static_cast<std::size_t>(count / world_.size);
    void* const own_chunk = at(buffer.send, rank_ * (count / world_.size));
    switch (op) {
      case Op::kAllReduce:
        BENCH_NCCL(nccl().all_reduce(buffer.send, buffer.send, static_cast<std::size_t>(count), ncclBfloat16,
                                     ncclSum, comm_, stream_));
        return;
      case Op::kReduceScatter:
        BENCH_NCCL(
            nccl().reduce_scatter(buffer.send, own_chunk, chunk, ncclBfloat16, ncclSum, comm_, stream_));
        return;
      case Op::kAllGather:
        BENCH_NCCL(nccl().all_gather(own_chunk, buffer.send, chunk, ncclBfloat16, comm_, stream_));
        return;
      case Op::kAllToAll:
        BENCH_NCCL(nccl().group_start());
        for (int peer = 0; peer < world_.size; ++peer) {
          const std::int64_t begin = peer * (count / world_.size);
          BENCH_NCCL(nccl().send(at(buffer.send, begin), chunk, ncclBfloat16, peer, comm_, stream_));
          BENCH_NCCL(nccl().receive(at(buffer.receive, begin), chunk, ncclBfloat16, peer, comm_, stream_));
        }
        BENCH_NCCL(nccl().group_end());
    }
  }

 private:
  static Buffer split(void* memory) { return {memory, static_cast<char*>(memory) + kMostBytes}; }

  void* allocate() {
    void* memory = nullptr;
    BENCH_NCCL(nccl().mem_alloc(&memory, 2 * kMostBytes));
    allocated_.push_back(memory);
    return memory;
  }
  void make_registered() {
    if (nccl().mem_alloc == nullptr || nccl().comm_register == nullptr) return;
    void* const memory = allocate();
    BENCH_NCCL(nccl().comm_register(comm_, memory, 2 * kMostBytes, &handle_));
    if (handle_ != nullptr) buffers_[kRegistered] = split(memory);
  }
  void make_symmetric() {
    if (nccl().mem_alloc == nullptr || nccl().comm_window_register == nullptr) return;
    void* const memory = allocate();
    BENCH_NCCL(
        nccl().comm_window_register(comm_, memory, 2 * kMostBytes, &window_, fo::cuda::kNcclSymmetricWindow));
    if (window_ != nullptr) buffers_[kSymmetric] = split(memory);
  }

  World& world_;
  int rank_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  DeviceBuffer plain_;
  std::vector<void*> allocated_;
  void* handle_ = nullptr;
  fo::cuda::NcclWindow window_ = nullptr;
  std::array<std::optional<Buffer>, kNumKinds> buffers_;
};

/// One operation at one size, on one rank.
class Case {
 public:
  Case(World& world, int rank, const Rank& own, Op op, std::int64_t count)
      : world_(world), rank_(rank), own_(own), op_(op), count_(count), timer_(own.stream()) {}

  void check(const Expected& expected) const {
    const DeviceBuffer errors(rank_, sizeof(unsigned), "errors");
    BENCH_CUDA(cudaMemsetAsync(errors.data(), 0, sizeof(unsigned), own_.stream()));
    const Expected::Region region = expected.of(op_);
    for (const Kind kind : kinds()) {
      const Buffer& buffer = *own_.buffer(kind);
      const auto bytes = static_cast<std::size_t>(count_ * kElementBytes);
      BENCH_CUDA(
          cudaMemcpyAsync(buffer.send, expected.own(), bytes, cudaMemcpyDeviceToDevice, own_.stream()));
      BENCH_CUDA(cudaMemsetAsync(buffer.receive, 0xFF, bytes, own_.stream()));
      own_.issue(op_, buffer, count_);
      void* const received = op_ == Op::kAllToAll ? buffer.receive : buffer.send;
      bench::count_differences(kType, at(received, region.begin), region.values, region.count, 0, 0,
                               static_cast<unsigned*>(errors.data()), own_.stream());
      unsigned found = 0;
      BENCH_CUDA(cudaMemcpyAsync(&found, errors.data(), sizeof found, cudaMemcpyDeviceToHost, own_.stream()));
      BENCH_CUDA(cudaStreamSynchronize(own_.stream()));
      if (found == 0) continue;
      std::fprintf(stderr, "%s of %lld elements, buffers of kind %d, rank %d: %u elements are wrong\n",
                   name_of(op_), static_cast<long long>(count_), kind, rank_, found);
      std::exit(1);
    }
  }

  /// Per kind; 0: there is none.
  std::array<double, kNumKinds> measure_us() {
    constexpr double kBatchUs = 1500;
    std::array<double, kNumKinds> medians{};
    std::array<std::vector<double>, kNumKinds> samples;
    const std::vector<Kind> turn = kinds();
    std::array<int, kNumKinds> launches{};
    for (const Kind kind : turn)
      launches[kind] = std::clamp(static_cast<int>(kBatchUs / batch_us(kind, 2)), 4, 20);
    for (int round = 0; round < world_.rounds; ++round) {
      for (const Kind kind : turn) samples[kind].push_back(batch_us(kind, launches[kind]));
      for (auto kind = turn.rbegin(); kind != turn.rend(); ++kind)
        samples[*kind].push_back(batch_us(*kind, launches[*kind]));
    }
    for (const Kind kind : turn) medians[kind] = bench::median(samples[kind]);
    return medians;
  }

 private:
  [[nodiscard]] std::vector<Kind> kinds() const {
    std::vector<Kind> found;
    for (const Kind kind : {kPlain, kRegistered, kSymmetric}) {
      if (own_.buffer(kind)) found.push_back(kind);
    }
    return found;
  }

  /// The slowest rank's mean of `launches` calls. New data each time, since sums in place grow; and one call
  /// before, so that the ranks' devices begin together.
  double batch_us(Kind kind, int launches) {
    const Buffer& buffer = *own_.buffer(kind);
    bench::fill_random(kType, buffer.send, count_, static_cast<std::uint64_t>(rank_) + 1, own_.stream());
    BENCH_CUDA(cudaStreamSynchronize(own_.stream()));
    world_.barrier.arrive_and_wait();
    own_.issue(op_, buffer, count_);
    const double us = timer_.batch_us([&](cudaStream_t) { own_.issue(op_, buffer, count_); }, launches);
    return world_.max_of(rank_, us);
  }

  World& world_;
  int rank_;
  const Rank& own_;
  Op op_;
  std::int64_t count_;
  bench::Timer timer_;
};

void print_row(Op op, std::int64_t bytes, int max_ctas, const std::array<double, kNumKinds>& us) {
  const std::string ctas = max_ctas == 0 ? "own" : std::to_string(max_ctas);
  std::printf("%-14s %4lld MiB %5s", name_of(op), static_cast<long long>(bytes / kMiB), ctas.c_str());
  for (const Kind kind : {kPlain, kRegistered, kSymmetric}) {
    if (us[kind] > 0) {
      std::printf(" | %8.1f %6.1f %6.3f", us[kind], static_cast<double>(bytes) / us[kind] / 1e3,
                  us[kind] / us[kPlain]);
    } else {
      std::printf(" | %8s %6s %6s", "", "", "");
    }
  }
  std::printf("\n");
  std::fflush(stdout);
}

void run_rank(World& world, int rank) {
  BENCH_CUDA(cudaSetDevice(rank));
  Expected expected(rank, world.size);
  for (const int max_ctas : kMaxCtas) {
    const Rank own(world, rank, max_ctas);
    for (const std::int64_t bytes : kSizes) {
      // Chunks of whole 16-byte vectors on every rank.
      const std::int64_t count = bytes / kElementBytes / (8 * world.size) * (8 * world.size);
      expected.set_count(count);
      for (const Op op : kOps) {
        Case one(world, rank, own, op, count);
        one.check(expected);
        const std::array<double, kNumKinds> us = one.measure_us();
        if (rank == 0) print_row(op, bytes, max_ctas, us);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  fo::cuda::prepare_environment();
  (void)setenv("NCCL_NVLS_ENABLE", "0", 1);
  int ranks = fo::cuda::device_count();
  int rounds = 5;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--ranks") == 0) ranks = std::stoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--rounds") == 0) rounds = std::stoi(argv[i + 1]);
  }
  if (ranks < 2 || ranks > fo::cuda::device_count()) {
    std::printf("skipped: %d ranks on %d CUDA devices; 2 or more are needed, each on its own\n", ranks,
                fo::cuda::device_count());
    return 0;
  }
  cudaDeviceProp properties{};
  BENCH_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf("# %d x %s, NCCL %s, bf16, medians of %d rounds of 2, slowest rank\n", ranks, properties.name,
              fo::cuda::library_version_text(nccl().version).c_str(), rounds);
  std::printf("# %-20s %5s | %-22s | %-22s | %-22s\n", "", "", "plain", "registered", "symmetric");
  std::printf("# %-20s %5s | %8s %6s %6s | %8s %6s %6s | %8s %6s %6s\n", "operation, size", "ctas", "us",
              "GB/s", "/plain", "us", "GB/s", "/plain", "us", "GB/s", "/plain");
  World world(ranks, rounds);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&, rank] { run_rank(world, rank); });
  for (std::thread& thread : threads) thread.join();
  return 0;
}
