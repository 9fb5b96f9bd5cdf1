// Predicted against measured times of GPU calls:
//
//   gpu_accuracy bench/tune/gpu_calls.csv [machine profile]
//
// The file has what `cluster_bench table` measured on four H200s (docs/gpu-cluster.md): GEMM + all-reduce and
// GEMM + reduce-scatter of 2 and 4 ranks. nccl24_us is the quickest overlapped call with NCCL on 24 SMs of
// the trial in which cluster_bench chooses. Nothing here is fitted to it: the default profile,
// 4x-h200-nvlink, has GEMMs of one m and n on 108 SMs and collectives alone. What a call takes besides GEMM
// and collective (the epilogue: residual and RMSNorm) is no part of the model, so it is taken as measured,
// serial - cuBLAS - NCCL, and added.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashoverlap/plan_builders.h"
#include "flashoverlap/predictor.h"
#include "flashoverlap/tuner.h"

namespace flashoverlap {
namespace {

constexpr std::int64_t kSms = 132;
constexpr std::int64_t kNcclSms = 24;

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

/// One line of the file.
class MeasuredCall {
 public:
  MeasuredCall(const std::vector<std::string>& names, const std::string& line) {
    const std::vector<std::string> values = split(line, ',');
    if (values.size() != names.size())
      throw std::runtime_error(
          fmt::format("'{}' has {} fields, expected {}", line, values.size(), names.size()));
    for (std::size_t i = 0; i < names.size(); ++i) values_[names[i]] = values[i];
  }
  [[nodiscard]] const std::string& text(const std::string& name) const { return values_.at(name); }
  [[nodiscard]] double us(const std::string& name) const { return std::stod(text(name)); }
  [[nodiscard]] std::int64_t number(const std::string& name) const { return std::stoll(text(name)); }

  [[nodiscard]] TuneRequest request() const {
    TuneRequest request;
    request.collective = text("op") == "ar" ? TransferKind::kAllReduce : TransferKind::kReduceScatter;
    request.world_size = number("ranks");
    request.m = number("m");
    request.n = number("n");
    request.k = number("k");
    request.dtype = DType::kBFloat16;
    return request;
  }
  /// The plan's tile, which the cluster's shape is part of: "sm90_pingpong_128x192x64_2x1_bf16".
  [[nodiscard]] TileShape tile() const {
    const std::vector<std::string> parts = split(text("variant"), '_');
    const std::vector<std::string> block = split(parts.at(2), 'x');
    const std::vector<std::string> cluster = split(parts.at(3), 'x');
    return {std::stoll(block.at(0)) * std::stoll(cluster.at(0)),
            std::stoll(block.at(1)) * std::stoll(cluster.at(1)), number("swizzle")};
  }
  [[nodiscard]] double epilogue_us() const { return us("serial_us") - us("cublas_us") - us("nccl_us"); }

 private:
  std::map<std::string, std::string> values_;
};

std::vector<MeasuredCall> read_calls(const char* path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) throw std::runtime_error(fmt::format("{} cannot be read", path));
  const std::vector<std::string> names = split(line, ',');
  std::vector<MeasuredCall> calls;
  while (std::getline(file, line)) calls.emplace_back(names, line);
  return calls;
}

/// The GEMM as the executor plans it, on the SMs that it leaves to itself: clusters of two.
double predicted_gemm_us(const MeasuredCall& call, const MachineProfile& machine) {
  TuneChoice choice;
  choice.tile = call.tile();
  choice.resources = {(kSms - call.number("sms_communication")) / 2, kNcclSms};
  const TuneRequest request = call.request();
  const PlanOptions options{.world_size = static_cast<std::int32_t>(request.world_size),
                            .dtype = request.dtype,
                            .m = request.m,
                            .n = request.n,
                            .k = request.k,
                            .tile_m = choice.tile.tile_m,
                            .tile_n = choice.tile.tile_n,
                            .swizzle = choice.tile.swizzle,
                            .resources = choice.resources,
                            .partition = {}};
  choice.partition = {request.collective == TransferKind::kAllReduce
                          ? num_waves(options)
                          : num_waves_reduce_scatter(options, RowOwnership::kContiguous)};
  return overlap_cost(plans_for(request, choice), machine).finish_us.back();
}

class Errors {
 public:
  explicit Errors(std::string what) : what_(std::move(what)) {}
  void add(double predicted, double measured) { relative_.push_back((predicted - measured) / measured); }
  void print() const {
    double mean = 0;
    double bias = 0;
    double worst = 0;
    for (const double error : relative_) {
      mean += std::abs(error) / static_cast<double>(relative_.size());
      bias += error / static_cast<double>(relative_.size());
      worst = std::max(worst, std::abs(error));
    }
    fmt::print("{:64} {} cases: mean error {:.1f} %, mean of predicted / measured {:.3f}, worst {:.0f} %\n",
               what_, relative_.size(), 100 * mean, 1 + bias, 100 * worst);
  }

 private:
  std::string what_;
  std::vector<double> relative_;
};

void compare(const std::vector<MeasuredCall>& calls, const MachineProfile& machine) {
  fmt::print("predicted us (measured us)\n");
  Errors gemm("GEMM on the SMs left by communication, as the executor plans it");
  Errors all("GEMM of the serial call, on all SMs (measured: cuBLAS)");
  Errors collective("collective of the serial call (measured: NCCL's own choice of SMs)");
  Errors serial("serial");
  Errors overlapped("best overlapped with NCCL on 24 SMs");
  Errors speedup("speed-up with NCCL on 24 SMs");
  for (const MeasuredCall& call : calls) {
    TuneRequest request = call.request();
    const double epilogue = call.epilogue_us();
    const double gemm_us = predicted_gemm_us(call, machine);
    gemm.add(gemm_us, call.us("signal_us"));
    const Prediction& one = tune_call(request, machine).serial.prediction;
    all.add(one.compute_us, call.us("cublas_us"));
    collective.add(one.communication_us, call.us("nccl_us"));
    const double serial_us = one.total_us + epilogue;
    serial.add(serial_us, call.us("serial_us"));
    request.communication_units = {kNcclSms};
    request.tiles = {call.tile()};
    const TuneResult tuned = tune_call(request, machine);
    double best = std::numeric_limits<double>::infinity();
    for (const TuneChoice& choice : tuned.candidates)
      if (choice.overlaps()) best = std::min(best, choice.prediction.total_us + epilogue);
    if (!std::isfinite(best)) continue;
    overlapped.add(best, call.us("nccl24_us"));
    speedup.add(serial_us / best, call.us("serial_us") / call.us("nccl24_us"));
    fmt::print("{} {} {}x{}x{}: GEMM {:.0f} ({:.0f}), serial {:.0f} ({:.0f}), with NCCL {:.0f} ({:.0f})\n",
               call.text("ranks"), call.text("op"), call.text("m"), call.text("n"), call.text("k"), gemm_us,
               call.us("signal_us"), serial_us, call.us("serial_us"), best, call.us("nccl24_us"));
  }
  for (const Errors* errors : {&gemm, &all, &collective, &serial, &overlapped, &speedup}) errors->print();
}

}  // namespace
}  // namespace flashoverlap

int main(int argc, char** argv) {
  try {
    if (argc < 2 || argc > 3) throw std::runtime_error("expected CALLS.csv [MACHINE]");
    flashoverlap::compare(flashoverlap::read_calls(argv[1]),
                          flashoverlap::load_machine_profile(argc == 3 ? argv[2] : "4x-h200-nvlink"));
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "gpu_accuracy: {}\n", error.what());
    return 2;
  }
}
