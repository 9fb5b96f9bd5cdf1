#include "operator_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <ostream>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "core/median.h"
#include "cuda_stream.h"
#include "gemm_choice.h"
#include "measure_transfers.h"
#include "ops/choose.h"
#include "peer_reader.h"
#include "sm_partition.h"
#include "test_matrices.h"

namespace bench {

using namespace flashoverlap;

namespace {

constexpr int kCalls = 8;             // of a batch
constexpr std::int64_t kElement = 2;  // bytes

std::vector<std::int64_t> one_hot(int world_size, int rank, std::int64_t count) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(world_size), 0);
  counts[static_cast<std::size_t>(rank)] = count;
  return counts;
}

}  // namespace

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::vector<Shape> parse_shapes(const std::string& text) {
  std::vector<Shape> shapes;
  for (const std::string& part : split(text)) {
    long long m = 0, n = 0, k = 0;
    char rest = 0;
    if (std::sscanf(part.c_str(), "%lldx%lldx%lld%c", &m, &n, &k, &rest) != 3 || m < 1 || n < 1 || k < 1)
      throw std::runtime_error("--shapes has '" + part + "', expected MxNxK");
    shapes.push_back({m, n, k});
  }
  return shapes;
}

OperatorBench::OperatorBench(gpu_test::Rank& rank, const OperatorSettings& settings, std::string op,
                             const Shape& shape, std::shared_ptr<Communicator> serial_communicator)
    : rank_(rank),
      settings_(settings),
      op_(std::move(op)),
      shape_(shape),
      output_rows_(op_ == "rs" ? shape.m / rank.world_size : shape.m),
      stream_(static_cast<cudaStream_t>(rank.native_stream())),
      serial_communicator_(serial_communicator == nullptr ? rank.communicator
                                                          : std::move(serial_communicator)) {
  const auto make = [&](std::int64_t count, std::uint64_t seed, const char* what) {
    cuda::DeviceBuffer buffer(device(), count * kElement, what, gpu_test::readable_memory());
    const auto salt = 1000 * static_cast<std::uint64_t>(rank.rank);
    if (seed > 0) fill_random(Element16::kBf16, buffer.data(), count, salt + seed, stream_);
    return buffer;
  };
  a_ = make(shape.m * shape.k, 1, "A");
  b_ = make(shape.n * shape.k, 2, "B");
  out_ = make(shape.m * shape.n, 0, "out");
  reference_ = make(output_rows_ * shape.n, 0, "the serial output");
  weight_ = make(shape.n, 3, "the norm's weight");
  residual_ = make(output_rows_ * shape.n, 4, "the residual");
  operands_ = {.a = a_.data(),
               .lda = shape.k,
               .b = b_.data(),
               .ldb = shape.k,
               .out = out_.data(),
               .ldo = shape.n,
               .epilogue = {},
               .stream = stream_};
  if (settings.with_epilogue) {
    operands_.epilogue.residual = residual_.data();
    operands_.epilogue.residual_ld = shape.n;
    operands_.epilogue.rms_norm_weight = weight_.data();
  }
  begin_ = cuda::Event(true);
  end_ = cuda::Event(true);
  rank_.stream->synchronize();
}

OperatorBench::~OperatorBench() {
  try {
    rank_.stream->synchronize();
  } catch (const Error&) {
  }
}

double OperatorBench::quickest_us() {
  choose_gemm();
  Result result;
  result.waves = num_waves_of_plan();
  return choose(measure_curve(), result).us;
}

Result OperatorBench::measure(Timeline* timeline) {
  choose_gemm();
  Result result;
  result.ranks = rank_.world_size;
  result.communication_sms = settings_.communication_sms;
  result.op = op_;
  result.shape = shape_;
  result.variant = variant_->name;
  result.swizzle = options_.swizzle;
  result.waves = num_waves_of_plan();
  const Prepared serial = prepare_serial();
  (void)batch(serial, Mode::kRun, 2);
  const BandwidthCurve curve = measure_curve();
  const Candidate best = choose(curve, result);
  result.partition = best.partition;
  const double serial_us = std::min(batch(serial, Mode::kRun, kCalls), batch(serial, Mode::kRun, kCalls));
  // A partition of one group is serial under another name.
  const bool overlaps = best.us < serial_us && (gathers() || best.partition.size() > 1);
  result.method = !overlaps ? "serial" : (gathers() ? "messages" : "signal");
  const Prepared overlapped = overlaps ? prepare(best.partition) : prepare_serial();
  const Prepared defaulted = prepare(by_default(result.waves));
  result.wrong = compare(serial, defaulted) + compare(serial, overlapped);
  result.us = time_all(serial, overlapped, defaulted);
  if (overlaps)
    result.predicted_us = gathers() ? predict_gather(result, curve) : predict_signal(result, curve);
  trace(serial, overlapped, timeline);
  rank_.stream->synchronize();
  return result;
}

// --- plans ----------------------------------------------------------------------------------------------

int OperatorBench::gemm_sms() const {
  if (rank_.options.partition.compute != nullptr) return rank_.options.partition.compute->num_sms();
  return cuda::num_sms(device()) - rank_.options.communication_sms;
}

PlanOptions OperatorBench::base_options() const {
  PlanOptions options;
  options.rank = rank_.rank;
  options.world_size = rank_.world_size;
  options.dtype = DType::kBFloat16;
  options.m = shape_.m;
  options.n = shape_.n;
  options.k = shape_.k;
  return options;
}

OverlapPlan OperatorBench::build(const PlanOptions& options, const Partition& partition) const {
  if (gathers())
    return plan_all_gather_gemm(options, {.sizes = {}, .parts = partition.empty() ? 0 : partition.front()});
  PlanOptions own = options;
  own.partition = partition;
  if (op_ == "ar") return plan_all_reduce(own);
  if (op_ == "rs") return plan_reduce_scatter(own, RowOwnership::kContiguous);
  if (op_ != "a2a") throw std::runtime_error("'" + op_ + "' is not an operator; there are ar, rs, a2a, ag");
  // As tokens are routed: every row somewhere else, equally many everywhere.
  Routing routing;
  for (int r = 0; r < rank_.world_size; ++r) {
    std::vector<std::int32_t> destinations(static_cast<std::size_t>(shape_.m));
    for (std::size_t i = 0; i < destinations.size(); ++i) {
      destinations[i] = static_cast<std::int32_t>((i + static_cast<std::size_t>(r)) %
                                                  static_cast<std::size_t>(rank_.world_size));
    }
    routing.destinations.push_back(std::move(destinations));
  }
  return plan_all_to_all(own, routing);
}

OverlapPlan OperatorBench::build_serial() const {
  return gathers() ? plan_sliced_all_gather_gemm(options_, {}, 1) : build(options_, {num_waves_of_plan()});
}

OperatorBench::Prepared OperatorBench::prepare_serial() {
  return {serial_executor_.get(), serial_executor_->prepare(build_serial())};
}

OperatorBench::Prepared OperatorBench::prepare(const Partition& partition) {
  return {executor_.get(), executor_->prepare(build(options_, partition))};
}

std::int64_t OperatorBench::num_waves_of_plan() const {
  if (op_ == "rs") return num_waves_reduce_scatter(options_, RowOwnership::kContiguous);
  return num_waves(options_);
}

OperatorBench::Partition OperatorBench::by_default(std::int64_t waves) const {
  return gathers() ? Partition{} : ops::open_partition(options_, waves, ops::kGpuGroupBytes);
}

// --- the GEMM -------------------------------------------------------------------------------------------

std::unique_ptr<Executor> OperatorBench::make_executor(const std::string& variant) {
  CudaOptions options = rank_.options;
  options.gemm_variant = variant;
  return make_cuda_executor(rank_.communicator, options);
}

void OperatorBench::choose_gemm() {
  if (settings_.search_gemm) {
    search_gemm();
  } else {
    take_suggested_gemm();
  }
  executor_ = make_executor(variant_->name);
  CudaOptions serial = rank_.options;
  serial.sums = SumBy::kCommunicator;
  serial_executor_ = make_cuda_executor(serial_communicator_, serial);
}

// By the time of the signal GEMM on this rank's SMs while all ranks compute.
void OperatorBench::search_gemm() {
  double best_us = 1e30;
  for (const cuda::SignalGemmVariant* variant : cuda::variants_for(device(), DType::kBFloat16)) {
    if (!variant->exact_capability) continue;
    auto executor = make_executor(variant->name);
    PlanOptions options = base_options();
    options.tile_m = variant->tile_rows;
    options.tile_n = variant->tile_cols;
    options.resources = {.compute_units = std::max(1, gemm_sms() / variant->blocks_per_tile),
                         .communication_units = settings_.communication_sms / rank_.world_size};
    for (const std::int64_t swizzle : {1, 2, 4, 8, 16}) {
      options.swizzle = swizzle;
      if ((swizzle - 1) * options.tile_m >= options.m) continue;
      const double us = batch({executor.get(), executor->prepare(build(options, {}))}, Mode::kGemmOnly, 3);
      if (us < best_us) {
        best_us = us;
        variant_ = variant;
        options_ = options;
      }
    }
  }
  if (variant_ == nullptr) throw std::runtime_error("no signal GEMM for this device to search among");
}

void OperatorBench::take_suggested_gemm() {
  options_ = base_options();
  variant_ = &cuda::choose_variant(device(), DType::kBFloat16, shape_.m, shape_.n, shape_.k, gemm_sms(),
                                   shape_.k % 8 == 0, {});
  const auto shape = make_executor(variant_->name)
                         ->suggest({.m = shape_.m, .n = shape_.n, .k = shape_.k, .dtype = DType::kBFloat16});
  options_.tile_m = shape->tile_m;
  options_.tile_n = shape->tile_n;
  options_.swizzle = shape->swizzle;
  options_.resources = shape->resources;
}

// --- choice and prediction ------------------------------------------------------------------------------

// Time of the collective on the communication SMs, all ranks at once, at sizes up to the whole. All-gather:
// of a message to one rank and one from another. Where the restore kernel adds: of copying what it adds.
BandwidthCurve OperatorBench::measure_curve() {
  cuda::CudaStream stream(device(), cuda::CudaStream::Priority::kHigh, rank_.options.partition.communication);
  const int world = rank_.world_size;
  const std::int64_t whole = gathers() ? shape_.m / world * shape_.k : shape_.m * shape_.n;
  const cuda::DeviceBuffer send(device(), std::max<std::int64_t>(whole, 8) * kElement, "a message",
                                gpu_test::readable_memory());
  const bool copies = rank_.options.sums == SumBy::kRestore;
  const std::int64_t received = copies && op_ == "ar" ? whole * world : whole;
  const cuda::DeviceBuffer receive(device(), std::max<std::int64_t>(received, 8) * kElement, "a message");
  const TransferLabel label{.operation = "bandwidth curve"};
  std::vector<CurvePoint> points;
  for (std::int64_t part = 128; part >= 1; part /= 2) {
    const std::int64_t share = std::max<std::int64_t>(8, whole / part / world / 8 * 8);
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(world), share);
    const std::int64_t count = share * world;
    if (count > whole) continue;
    constexpr int kRepeats = 6;
    const auto call = [&] {
      Communicator& ranks = *rank_.communicator;
      if (copies && op_ == "ar") {
        const std::vector<std::int64_t> all(static_cast<std::size_t>(world), count);
        ranks.all_gather(send.data(), receive.data(), all, DType::kBFloat16, stream, label);
      } else if (copies && op_ == "rs") {
        ranks.all_to_all(send.data(), counts, receive.data(), counts, DType::kBFloat16, stream, label);
      } else if (op_ == "ar") {
        ranks.all_reduce(send.data(), send.data(), count, DType::kBFloat16, stream, label);
      } else if (op_ == "rs") {
        void* const own = static_cast<char*>(send.data()) + share * rank_.rank * kElement;
        ranks.reduce_scatter(send.data(), own, counts, DType::kBFloat16, stream, label);
      } else if (op_ == "a2a") {
        ranks.all_to_all(send.data(), counts, receive.data(), counts, DType::kBFloat16, stream, label);
      } else {
        ranks.all_to_all(send.data(), one_hot(world, (rank_.rank + 1) % world, count), receive.data(),
                         one_hot(world, (rank_.rank + world - 1) % world, count), DType::kBFloat16, stream,
                         label);
      }
    };
    // As the executor does it: a call's messages in one meeting.
    const auto messages = [&](cuda::PeerReader& peers) {
      const cuda::PeerMessage to{(rank_.rank + 1) % world, send.data(), count};
      const cuda::PeerMessage from{(rank_.rank + world - 1) % world, receive.data(), count};
      peers.exchange_messages(std::vector(kRepeats, to), std::vector(kRepeats, from), DType::kBFloat16,
                              stream, label, {.begins = [](std::size_t) {}, .arrived = [](std::size_t) {}});
    };
    call();
    double us = std::numeric_limits<double>::infinity();
    for (int attempt = 0; attempt < 3; ++attempt) {  // the host's hiccups are not the link's
      stream.synchronize();
      (void)rank_.communicator->exchange(std::uint64_t{0}, label);
      begin_.record(stream.get());
      if (copies && gathers()) {
        messages(dynamic_cast<cuda::PeerReader&>(*rank_.communicator));
      } else {
        for (int i = 0; i < kRepeats; ++i) call();
      }
      end_.record(stream.get());
      stream.synchronize();
      us = std::min(us, slowest_us(kRepeats));
    }
    points.push_back({.bytes = static_cast<double>(count * kElement), .time_us = us});
  }
  return BandwidthCurve(std::move(points), op_);
}

double OperatorBench::measured_us(const Partition& partition) {
  // In batches as long as those of the final timing: in shorter ones the host's work hides.
  const Prepared plan = prepare(partition);
  return std::min({batch(plan, Mode::kRun, kCalls), batch(plan, Mode::kRun, kCalls)});
}

OverlapCost OperatorBench::cost_of(std::int64_t waves, double gemm_us, const BandwidthCurve& curve) {
  OverlapCost cost{.finish_us = {}, .bytes = {}, .curve = curve, .signal_us = 6, .restore_us = 0};
  const OverlapPlan finest = build(options_, Partition(static_cast<std::size_t>(waves), 1));
  for (std::int64_t w = 0; w < waves; ++w) {
    cost.finish_us.push_back(gemm_us * static_cast<double>(w + 1) / static_cast<double>(waves));
    cost.bytes.push_back(finest.transfers[static_cast<std::size_t>(w)].source.count * kElement);
  }
  return cost;
}

OperatorBench::Candidate OperatorBench::choose(const BandwidthCurve& curve, Result& result) {
  return gathers() ? choose_parts() : choose_partition(result.waves, curve, result);
}

// Tries the default partition and those that the predictor likes best; the best measured one is taken.
OperatorBench::Candidate OperatorBench::choose_partition(std::int64_t waves, const BandwidthCurve& curve,
                                                         Result& result) {
  Candidate best{by_default(waves), 0};
  best.us = measured_us(best.partition);
  if (waves < 2) return best;
  const Prepared finest = prepare(Partition(static_cast<std::size_t>(waves), 1));
  const double gemm_us = std::min(batch(finest, Mode::kGemmOnly, 4), batch(finest, Mode::kGemmOnly, 4));
  OverlapCost cost = cost_of(waves, gemm_us, curve);
  // What the model leaves out, the slow-down of the GEMM by communication and the epilogue, is calibrated
  // on one partition.
  cost.restore_us = std::max(0.0, best.us - predict(cost, best.partition).total_us);
  double favourite_us = 0;
  for (const PartitionChoice& choice : best_partitions(cost, settings_.search_gemm ? 8 : 4)) {
    if (choice.partition.size() < 2) continue;
    const double us = measured_us(choice.partition);
    if (favourite_us == 0) favourite_us = us;
    result.predicted_error += std::abs(choice.prediction.total_us - us) / us;
    ++result.tried;
    if (us < best.us) best = {choice.partition, us};
  }
  if (result.tried > 0) {
    result.predicted_error /= static_cast<double>(result.tried);
    result.favourite = best.us / favourite_us;
  }
  return best;
}

// In how many parts a slice travels.
OperatorBench::Candidate OperatorBench::choose_parts() {
  Candidate best{{}, 0};
  for (const std::int64_t parts : {1, 2, 4}) {
    const double us = measured_us({parts});
    if (best.partition.empty() || us < best.us) best = {{parts}, us};
  }
  return best;
}

double OperatorBench::predict_signal(const Result& result, const BandwidthCurve& curve) {
  OverlapCost cost = cost_of(result.waves, result.us.signal, curve);
  cost.restore_us = std::max(0.0, result.us.serial - result.us.cublas - result.us.communication);
  return predict(cost, result.partition).total_us;
}

// Parts arrive one after the other from the start on; each is multiplied when it has arrived and what was
// there before is done.
double OperatorBench::predict_gather(const Result& result, const BandwidthCurve& curve) {
  const std::int64_t parts = std::max<std::int64_t>(1, result.partition.front());
  const std::int64_t slice_bytes = shape_.m / rank_.world_size * shape_.k * kElement;
  const double part_us =
      result.us.signal / static_cast<double>(rank_.world_size) / static_cast<double>(parts);
  double done_us = part_us * static_cast<double>(parts);
  double arrived_us = 0;
  for (std::int64_t i = 0; i < (rank_.world_size - 1) * parts; ++i) {
    arrived_us += curve.time_us(slice_bytes / parts);
    done_us = std::max(done_us, arrived_us) + part_us;
  }
  return done_us + std::max(0.0, result.us.serial - result.us.cublas - result.us.communication);
}

// --- times ----------------------------------------------------------------------------------------------

void OperatorBench::execute(const Prepared& plan, Mode mode, Timeline* timeline) {
  plan.executor->execute(*plan.plan, operands_, mode, timeline);
}

// Time of one call, of the slowest rank, the same on all ranks.
double OperatorBench::batch(const Prepared& plan, Mode mode, int calls) {
  execute(plan, mode);
  rank_.stream->synchronize();
  (void)rank_.communicator->exchange(std::uint64_t{0}, {.operation = "start of a batch"});
  begin_.record(stream_);
  for (int i = 0; i < calls; ++i) execute(plan, mode);
  end_.record(stream_);
  rank_.stream->synchronize();
  return slowest_us(calls);
}

// From begin_ to end_, per call, of the slowest rank.
double OperatorBench::slowest_us(int calls) {
  float ms = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
  return cuda::slowest_of(*rank_.communicator, static_cast<double>(ms) * 1e3 / calls);
}

Times OperatorBench::time_all(const Prepared& serial, const Prepared& overlapped, const Prepared& defaulted) {
  std::vector<double> samples[8];
  for (int round = 0; round < settings_.rounds; ++round) {
    samples[0].push_back(batch(serial, Mode::kGemmOnly, kCalls));
    samples[1].push_back(batch(defaulted, Mode::kPlainGemm, kCalls));
    samples[2].push_back(batch(defaulted, Mode::kGemmOnly, kCalls));
    samples[3].push_back(batch(serial, Mode::kCommunicationOnly, kCalls));
    samples[4].push_back(batch(overlapped, Mode::kCommunicationOnly, kCalls));
    samples[5].push_back(batch(serial, Mode::kRun, kCalls));
    samples[6].push_back(batch(overlapped, Mode::kRun, kCalls));
    samples[7].push_back(batch(defaulted, Mode::kRun, kCalls));
    std::this_thread::sleep_for(std::chrono::milliseconds(settings_.pause_ms));
  }
  const auto of = [&](std::size_t i) { return core::median(samples[i]); };
  return {.cublas = of(0),
          .plain = of(1),
          .signal = of(2),
          .communication = of(3),
          .grouped = of(4),
          .serial = of(5),
          .overlapped = of(6),
          .by_default = of(7)};
}

// Elements of this rank in which the two methods differ by more than rounding: bf16 has 8 bits; an element
// has a standard deviation of sqrt(k) / 3 on each rank.
unsigned OperatorBench::compare(const Prepared& serial, const Prepared& overlapped) {
  const auto bytes = static_cast<std::size_t>(output_rows_ * shape_.n * kElement);
  const cuda::DeviceBuffer counter(device(), 4, "a counter");
  FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(counter.data(), 0, 4, stream_));
  FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(out_.data(), 0xFF, bytes, stream_));
  execute(serial, Mode::kRun);
  FLASHOVERLAP_CUDA_CHECK(
      cudaMemcpyAsync(reference_.data(), out_.data(), bytes, cudaMemcpyDeviceToDevice, stream_));
  FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(out_.data(), 0xFF, bytes, stream_));
  execute(overlapped, Mode::kRun);
  // After the norm elements are about 1 in size, before it sqrt(k) / 3 for each rank.
  const float absolute = settings_.with_epilogue ? 0.05F
                                                 : 0.02F * static_cast<float>(rank_.world_size) *
                                                       std::sqrt(static_cast<float>(shape_.k));
  count_differences(Element16::kBf16, out_.data(), reference_.data(), output_rows_ * shape_.n, 0.02F,
                    absolute, static_cast<unsigned*>(counter.data()), stream_);
  unsigned wrong = 0;
  rank_.stream->synchronize();
  FLASHOVERLAP_CUDA_CHECK(cudaMemcpyAsync(&wrong, counter.data(), 4, cudaMemcpyDeviceToHost, stream_));
  rank_.stream->synchronize();
  return wrong;
}

void OperatorBench::trace(const Prepared& serial, const Prepared& overlapped, Timeline* timeline) {
  if (timeline == nullptr) return;
  for (const Prepared* plan : {&serial, &overlapped}) {
    (void)rank_.communicator->exchange(std::uint64_t{0}, {.operation = "traced call"});
    execute(*plan, Mode::kRun, timeline);
  }
}

// --- results --------------------------------------------------------------------------------------------

std::string text_of(const std::vector<std::int64_t>& values) {
  return fmt::format("{}", fmt::join(values, ","));
}

void append_json(std::ostream& out, const Result& r, const std::string& communicator) {
  out << fmt::format(
             R"({{"ranks":{},"op":"{}","m":{},"n":{},"k":{},"communicator":"{}","sms_communication":{},)",
             r.ranks, r.op, r.shape.m, r.shape.n, r.shape.k, communicator, r.communication_sms)
      << fmt::format(R"("cublas_us":{:.3f},"plain_us":{:.3f},"signal_us":{:.3f},"communication_us":{:.3f},)",
                     r.us.cublas, r.us.plain, r.us.signal, r.us.communication)
      << fmt::format(R"("grouped_us":{:.3f},"serial_us":{:.3f},"overlapped_us":{:.3f},"default_us":{:.3f},)",
                     r.us.grouped, r.us.serial, r.us.overlapped, r.us.by_default)
      << fmt::format(R"("method":"{}","variant":"{}","swizzle":{},"waves":{},"partition":[{}],)", r.method,
                     r.variant, r.swizzle, r.waves, text_of(r.partition))
      << fmt::format(R"("predicted_us":{:.3f},"predicted_error":{:.5f},"favourite":{:.5f},"wrong":{}}})",
                     r.predicted_us, r.predicted_error, r.favourite, r.wrong)
      << std::endl;
}

}  // namespace bench
