// The signal GEMM against cuBLAS, and against itself without signals and placement. bf16, random data, one
// GPU.
//   signal_gemm_bench [--sms 132,116] [--rounds 15] [--pause-ms 30] [--soak-ms 0] [--shapes MxNxK,...] [--csv
//   FILE] [--only SUBSTRING]
// For every shape and number of SMs: each variant with several tile orders is checked and timed briefly; the
// best is then timed in turn with itself without signals and placement, with itself without them but with
// gates that are all open (of all tiles; of all but the first quarter, as where the own slice comes first),
// and with the best cuBLAS algorithm for the same number of SMs.
#include <cuda_profiler_api.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>

#include "signal_gemm.h"
#include "test_matrices.h"
#include "timing.h"

namespace {

namespace fc = flashoverlap::cuda;
using Element = std::uint16_t;  // bf16 bits
constexpr auto kType = bench::Element16::kBf16;

struct Shape {
  int m, n, k;
};

constexpr Shape kShapes[] = {{2048, 8192, 8192},  {4096, 8192, 7168}, {4096, 4096, 4096}, {8192, 8192, 8192},
                             {4096, 8192, 1024},  {4096, 8192, 2048}, {8192, 4096, 1792}, {16384, 8192, 2048},
                             {16384, 8192, 3584}, {1024, 8192, 8192}, {4000, 8008, 2056}, {3333, 5120, 4096},
                             {777, 4104, 7168}};
constexpr int kGroups = 8;

struct Options {
  std::vector<int> sms = {132, 116};
  std::vector<Shape> shapes{std::begin(kShapes), std::end(kShapes)};
  int rounds = 15;
  int pause_ms = 30;  // between rounds, so that the card does not run into its power limit for good
  int soak_ms = 0;    // > 0: also run each contender for so long and print what the card says of itself
  std::string csv;
  std::string only;
};

// Device memory that frees itself.
template <class T>
struct Buffer {
  explicit Buffer(std::int64_t count) {
    BENCH_CUDA(cudaMalloc(&data, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T)));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  T* data = nullptr;
};

// How tiles are ordered: bands of `width` tile rows (or columns) walked across, one after the other.
struct Order {
  bool bands_of_rows;
  int width;
};

std::vector<std::pair<int, int>> tile_order(int tiles_m, int tiles_n, const Order& order) {
  std::vector<std::pair<int, int>> tiles;
  const int along = order.bands_of_rows ? tiles_m : tiles_n;
  const int across = order.bands_of_rows ? tiles_n : tiles_m;
  for (int band = 0; band < along; band += order.width) {
    for (int i = 0; i < across; ++i) {
      for (int j = band; j < std::min(along, band + order.width); ++j) {
        tiles.emplace_back(order.bands_of_rows ? j : i, order.bands_of_rows ? i : j);
      }
    }
  }
  return tiles;
}

// One schedule with placement and groups on the device.
struct Schedule {
  Schedule(const Shape& shape, const fc::SignalGemmVariant& variant, const Order& order, bool packed) {
    const auto ceil_div = [](int a, int b) { return (a + b - 1) / b; };
    const auto tiles =
        tile_order(ceil_div(shape.m, variant.tile_rows), ceil_div(shape.n, variant.tile_cols), order);
    std::vector<fc::TileWork> work;
    std::vector<bench::PackedTile> places;
    std::int64_t offset = 0;
    for (std::size_t p = 0; p < tiles.size(); ++p) {
      fc::TileWork tile;
      tile.row_begin = tiles[p].first * variant.tile_rows;
      tile.col_begin = tile.weight_row = tiles[p].second * variant.tile_cols;
      tile.rows = static_cast<std::int16_t>(std::min(variant.tile_rows, shape.m - tile.row_begin));
      tile.cols = static_cast<std::int16_t>(std::min(variant.tile_cols, shape.n - tile.col_begin));
      tile.group = packed ? static_cast<int>(p * kGroups / tiles.size()) : -1;
      if (packed) {
        const bool is_whole = tile.cols == variant.tile_cols && offset % variant.tile_cols == 0;
        tile.kind = is_whole ? fc::StoreKind::kWhole : fc::StoreKind::kDense;
        tile.payload = is_whole ? offset / variant.tile_cols : offset;
      }
      work.push_back(tile);
      places.push_back({offset, tile.row_begin, tile.col_begin, tile.rows, tile.cols});
      offset += tile.rows * tile.cols;
    }
    device = std::make_unique<Buffer<fc::TileWork>>(static_cast<std::int64_t>(work.size()));
    BENCH_CUDA(
        cudaMemcpy(device->data, work.data(), work.size() * sizeof(fc::TileWork), cudaMemcpyHostToDevice));
    device_places = std::make_unique<Buffer<bench::PackedTile>>(static_cast<std::int64_t>(work.size()));
    BENCH_CUDA(cudaMemcpy(device_places->data, places.data(), places.size() * sizeof places[0],
                          cudaMemcpyHostToDevice));
    tables.schedule = device->data;
    tables.num_positions = static_cast<int>(work.size());
  }
  std::unique_ptr<Buffer<fc::TileWork>> device;
  std::unique_ptr<Buffer<bench::PackedTile>> device_places;
  fc::DeviceTables tables;
};

struct Candidate {
  const fc::SignalGemmVariant* variant = nullptr;
  Order order{};
  std::shared_ptr<Schedule> schedule, plain_schedule;
  std::shared_ptr<fc::PreparedGemm> gemm, plain, placed, gated, own_first;
  double us = 0;
};

class ShapeBench {
 public:
  ShapeBench(const Shape& shape, cublasLtHandle_t handle)
      : shape_(shape),
        handle_(handle),
        a_(1LL * shape.m * shape.k),
        b_(1LL * shape.n * shape.k),
        d_(size()),
        packed_(size()),
        reference_(size()),
        counters_(kGroups),
        errors_(1),
        arrivals_(2 * kMostPositions + 1),
        workspace_(kWorkspaceBytes) {
    BENCH_CUDA(cudaStreamCreate(&stream_));
    std::vector<std::uint32_t> words(2 * kMostPositions + 1, 1);
    std::fill_n(words.begin(), kMostPositions, 0);
    BENCH_CUDA(cudaMemcpy(arrivals_.data, words.data(), words.size() * sizeof(std::uint32_t),
                          cudaMemcpyHostToDevice));
    bench::fill_random(kType, a_.data, 1LL * shape.m * shape.k, 1, stream_);
    bench::fill_random(kType, b_.data, 1LL * shape.n * shape.k, 2, stream_);
    BENCH_CUDA(cudaStreamSynchronize(stream_));
  }
  ~ShapeBench() { cudaStreamDestroy(stream_); }

  void run(int num_sms, const Options& options, std::ostream* csv) {
    bench::Timer timer(stream_);
    bench::CublasGemm cublas(handle_, CUDA_R_16BF, shape_.m, shape_.n, shape_.k, num_sms, a_.data, b_.data,
                             reference_.data, workspace_.data, kWorkspaceBytes);
    const bench::Launch cublas_launch = [&](cudaStream_t s) { cublas.launch(s); };
    choose_cublas(cublas, cublas_launch, timer);
    std::vector<Candidate> candidates = time_candidates(num_sms, options, timer, csv);
    if (candidates.empty()) return;
    std::vector<bench::Launch> contenders = {cublas_launch};
    constexpr std::size_t kFinal = 4;
    for (std::size_t i = 0; i < std::min(kFinal, candidates.size()); ++i) {
      contenders.push_back([gemm = candidates[i].gemm](cudaStream_t s) { gemm->launch(s); });
    }
    const std::vector<double> us = timer.compare_us(contenders, options.rounds, options.pause_ms);
    std::size_t best = 1;
    for (std::size_t i = 2; i < us.size(); ++i) best = us[i] < us[best] ? i : best;
    const Candidate& winner = candidates[best - 1];
    const std::vector<bench::Launch> pair = {contenders[best],
                                             [gemm = winner.plain](cudaStream_t s) { gemm->launch(s); },
                                             [gemm = winner.placed](cudaStream_t s) { gemm->launch(s); },
                                             [gemm = winner.gated](cudaStream_t s) { gemm->launch(s); },
                                             [gemm = winner.own_first](cudaStream_t s) { gemm->launch(s); }};
    const std::vector<double> pair_us = timer.compare_us(pair, options.rounds, options.pause_ms);
    const double tflops = 2.0 * shape_.m * shape_.n * shape_.k * 1e-6;
    std::printf(
        "%5d x %5d x %5d %4d | %8.1f %6.1f | %8.1f %6.1f | %6.3f | %6.4f %6.4f %6.4f %6.4f | %s %s%d\n",
        shape_.m, shape_.n, shape_.k, num_sms, us[0], tflops / us[0], us[best], tflops / us[best],
        us[0] / us[best], pair_us[0] / pair_us[1], pair_us[2] / pair_us[1], pair_us[3] / pair_us[0],
        pair_us[4] / pair_us[0], winner.variant->name, winner.order.bands_of_rows ? "rows" : "cols",
        winner.order.width);
    std::fflush(stdout);
    if (options.soak_ms > 0)
      soak(timer, {contenders[0], contenders[best], pair[1]}, {us[0], us[best], us[best]}, options.soak_ms);
    // For ncu --profile-from-start off.
    BENCH_CUDA(cudaProfilerStart());
    for (const bench::Launch& launch : {contenders[0], pair[0], pair[1]}) {
      launch(stream_);
      launch(stream_);
    }
    BENCH_CUDA(cudaStreamSynchronize(stream_));
    BENCH_CUDA(cudaProfilerStop());
  }

 private:
  static constexpr std::int64_t kWorkspaceBytes = 64 << 20;
  static constexpr int kSearchRounds = 3;
  static constexpr int kMostPositions = 1 << 17;
  std::int64_t size() const { return 1LL * shape_.m * shape_.n; }
  std::size_t bytes() const { return static_cast<std::size_t>(size()) * sizeof(Element); }

  // Sustained: each contender alone, long enough to reach the power limit; clock and power are read while it
  // runs.
  static void soak(bench::Timer& timer, const std::vector<bench::Launch>& contenders,
                   const std::vector<double>& us, int soak_ms) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (std::size_t i = 0; i < contenders.size(); ++i) {
        std::thread reader([soak_ms] {
          std::this_thread::sleep_for(std::chrono::milliseconds(soak_ms * 6 / 10));
          (void)!std::system(
              "nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader");
        });
        const double mean = timer.batch_us(contenders[i], static_cast<int>(soak_ms * 1000 / us[i]));
        reader.join();
        std::printf("    soak: contender %zu %.1f us\n", i, mean);
        std::fflush(stdout);
      }
    }
  }

  void choose_cublas(bench::CublasGemm& cublas, const bench::Launch& launch, bench::Timer& timer) {
    std::vector<double> us;
    for (std::size_t i = 0; i < cublas.num_algorithms(); ++i) {
      cublas.choose(i);
      timer.batch_us(launch, 1);
      std::vector<double> samples;
      for (int j = 0; j < 3; ++j) samples.push_back(timer.batch_us(launch, 3));
      us.push_back(bench::median(samples));
    }
    cublas.choose(static_cast<std::size_t>(std::min_element(us.begin(), us.end()) - us.begin()));
    timer.batch_us(launch, 1);  // and leaves its result in reference_
  }

  // All variants in all orders, best first. They take turns, or the first ones would have the card while it
  // is cool.
  std::vector<Candidate> time_candidates(int num_sms, const Options& options, bench::Timer& timer,
                                         std::ostream* csv) {
    constexpr Order kOrders[] = {{true, 1},  {true, 2},  {true, 4},  {true, 8},  {true, 16},
                                 {false, 2}, {false, 4}, {false, 8}, {false, 16}};
    std::vector<Candidate> candidates;
    for (const fc::SignalGemmVariant* variant : fc::signal_gemm_variants()) {
      if (variant->type != fc::GemmType::kBf16) continue;
      // sm_80 kernels only when asked for: on this device they are for operands that the others cannot take.
      const bool is_named = std::string(variant->name).find(options.only) != std::string::npos;
      if (options.only.empty() ? !variant->exact_capability : !is_named) continue;
      for (const Order& order : kOrders) {
        Candidate candidate = make(*variant, order, num_sms);
        if (&order == &kOrders[0] && !check(candidate)) break;
        candidates.push_back(candidate);
      }
    }
    std::vector<bench::Launch> launches;
    for (const Candidate& candidate : candidates) {
      launches.push_back([gemm = candidate.gemm](cudaStream_t s) { gemm->launch(s); });
    }
    const std::vector<double> us = timer.compare_us(launches, kSearchRounds, 1, 1000);
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      Candidate& candidate = candidates[i];
      candidate.us = us[i];
      if (csv != nullptr) {
        *csv << shape_.m << ',' << shape_.n << ',' << shape_.k << ',' << num_sms << ','
             << candidate.variant->name << ',' << (candidate.order.bands_of_rows ? "rows" : "cols") << ','
             << candidate.order.width << ',' << us[i] << '\n';
      }
    }
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& x, const Candidate& y) { return x.us < y.us; });
    return candidates;
  }

  Candidate make(const fc::SignalGemmVariant& variant, const Order& order, int num_sms) {
    Candidate candidate;
    candidate.variant = &variant;
    candidate.order = order;
    candidate.schedule = std::make_shared<Schedule>(shape_, variant, order, true);
    candidate.plain_schedule = std::make_shared<Schedule>(shape_, variant, order, false);
    fc::SignalGemmArguments args;
    args.m = shape_.m;
    args.n = shape_.n;
    args.k = shape_.k;
    args.a = a_.data;
    args.lda = shape_.k;
    args.b = b_.data;
    args.ldb = shape_.k;
    args.packed = packed_.data;
    args.packed_size = size();
    args.output = d_.data;
    args.ldd = shape_.n;
    args.num_sms = num_sms;
    args.tables = candidate.schedule->tables;
    args.counters = counters_.data;
    candidate.gemm = variant.prepare(args);
    args.counters = nullptr;
    candidate.placed = variant.prepare(args);
    args.tables = candidate.plain_schedule->tables;
    candidate.plain = variant.prepare(args);
    // Tiles need one arrival, which is there, or none.
    if (args.tables.num_positions <= kMostPositions) {
      args.gates.arrivals = arrivals_.data + 2 * kMostPositions;
      args.gates.needed = arrivals_.data + kMostPositions;
    }
    candidate.gated = variant.prepare(args);
    args.gates.needed -= args.gates.needed == nullptr ? 0 : args.tables.num_positions / 4;
    candidate.own_first = variant.prepare(args);
    return candidate;
  }

  // Poisoned outputs, then both ways of storing against cuBLAS everywhere and float64 at samples, and the
  // counters.
  bool check(const Candidate& candidate) {
    BENCH_CUDA(cudaMemsetAsync(counters_.data, 0, kGroups * sizeof(std::uint32_t), stream_));
    BENCH_CUDA(cudaMemsetAsync(packed_.data, 0xff, bytes(), stream_));
    candidate.gemm->launch(stream_);
    BENCH_CUDA(cudaMemsetAsync(d_.data, 0xff, bytes(), stream_));
    bench::unpack_tiles(candidate.schedule->device_places->data, candidate.schedule->tables.num_positions,
                        packed_.data, d_.data, shape_.n, stream_);
    const unsigned packed_errors = count_errors();
    BENCH_CUDA(cudaMemsetAsync(d_.data, 0xff, bytes(), stream_));
    candidate.plain->launch(stream_);
    const unsigned plain_errors = count_errors();
    std::vector<std::uint32_t> counters(kGroups);
    BENCH_CUDA(
        cudaMemcpy(counters.data(), counters_.data, kGroups * sizeof(std::uint32_t), cudaMemcpyDeviceToHost));
    const std::uint32_t counted = std::accumulate(counters.begin(), counters.end(), 0U);
    const std::uint32_t expected = static_cast<std::uint32_t>(candidate.schedule->tables.num_positions *
                                                              candidate.variant->signals_per_tile);
    if (packed_errors + plain_errors == 0 && counted == expected) return true;
    std::printf("WRONG %s %d x %d x %d: %u packed, %u in place, counted %u of %u\n", candidate.variant->name,
                shape_.m, shape_.n, shape_.k, packed_errors, plain_errors, counted, expected);
    return false;
  }

  unsigned count_errors() {
    // Elements are sums of k products of magnitude 1/3: rounding to bf16 is 2^-9 of the value, accumulation
    // far less.
    const float absolute = 1e-4F * static_cast<float>(shape_.k) / 64.0F;
    BENCH_CUDA(cudaMemsetAsync(errors_.data, 0, sizeof(unsigned), stream_));
    bench::count_differences(kType, d_.data, reference_.data, size(), 1.0F / 64, absolute, errors_.data,
                             stream_);
    bench::check_samples(kType, a_.data, b_.data, shape_.m, shape_.n, shape_.k, d_.data, 1.0 / 128, absolute,
                         errors_.data, stream_);
    unsigned errors = 0;
    BENCH_CUDA(cudaMemcpyAsync(&errors, errors_.data, sizeof errors, cudaMemcpyDeviceToHost, stream_));
    BENCH_CUDA(cudaStreamSynchronize(stream_));
    return errors;
  }

  Shape shape_;
  cublasLtHandle_t handle_;
  cudaStream_t stream_{};
  Buffer<Element> a_, b_, d_, packed_, reference_;
  Buffer<std::uint32_t> counters_;
  Buffer<unsigned> errors_;
  Buffer<std::uint32_t> arrivals_;  // [kMostPositions] zeros, as many ones, and the arrivals: one
  Buffer<std::uint8_t> workspace_;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 >= argc) std::fprintf(stderr, "%s needs a value\n", argv[i]), std::exit(2);
    std::stringstream value(argv[i + 1]);
    std::string item;
    if (name == "--sms") {
      options.sms.clear();
      while (std::getline(value, item, ',')) options.sms.push_back(std::stoi(item));
    } else if (name == "--shapes") {
      options.shapes.clear();
      while (std::getline(value, item, ',')) {
        Shape shape{};
        if (std::sscanf(item.c_str(), "%dx%dx%d", &shape.m, &shape.n, &shape.k) != 3) std::exit(2);
        options.shapes.push_back(shape);
      }
    } else if (name == "--rounds") {
      options.rounds = std::stoi(value.str());
    } else if (name == "--pause-ms") {
      options.pause_ms = std::stoi(value.str());
    } else if (name == "--soak-ms") {
      options.soak_ms = std::stoi(value.str());
    } else if (name == "--csv") {
      options.csv = value.str();
    } else if (name == "--only") {
      options.only = value.str();
    } else {
      std::fprintf(stderr,
                   "unknown option %s; known: --sms --shapes --rounds --pause-ms --soak-ms --csv --only\n",
                   argv[i]);
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  cudaDeviceProp properties{};
  BENCH_CUDA(cudaGetDeviceProperties(&properties, 0));
  cublasLtHandle_t handle;
  BENCH_CUBLAS(cublasLtCreate(&handle));
  std::printf("# %s, %d SMs, cuBLASLt %zu, bf16, medians of %d rounds of %d\n", properties.name,
              properties.multiProcessorCount, cublasLtGetVersion(), options.rounds, 2);
  std::printf(
      "#     m       n       k  SMs |  cuBLAS us TFLOP/s | signal us TFLOP/s | cuBLAS/signal | "
      "signal+placement/plain placement/plain gated/signal own-first/signal | best\n");
  std::unique_ptr<std::ofstream> csv;
  if (!options.csv.empty()) {
    csv = std::make_unique<std::ofstream>(options.csv);
    *csv << "m,n,k,sms,variant,bands,width,us\n";
  }
  for (const Shape& shape : options.shapes) {
    ShapeBench shape_bench(shape, handle);
    for (const int sms : options.sms) shape_bench.run(sms, options, csv.get());
  }
  BENCH_CUBLAS(cublasLtDestroy(handle));
  return 0;
}
