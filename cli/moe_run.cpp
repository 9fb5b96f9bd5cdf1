#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>

#include "core/fail.h"
#include "core/half.h"
#include "core/median.h"
#include "format.h"
#include "matrices.h"
#include "moe_options.h"
#include "option_values.h"
#include "process_ranks.h"

/// `flashoverlap run moe-layer`: checked, measured serially and overlapped.
namespace flashoverlap::cli {
namespace {

struct MoeRun {
  MoeProblem problem;
  std::int64_t iterations = 5;
  bool link_is_auto = true;
  LinkModel link;
  bool adapt = false;
  bool json = false;
};

/// What comes of it; times are medians over the calls of the slowest rank.
struct MoeResult {
  double serial_us = 0;
  double overlap_us = 0;
  MoePhases serial;
  MoePhases overlap;
  MoeLayer::Parts parts;
  MoeReport report;  ///< Of rank 0.
  double backlog_us = 0;
  double consumer_idle = 0;
  double error = 0;  ///< Largest relative error of the tokens checked.
  std::int64_t checked = 0;
  bool equals_serial = true;
  bool same_bits_expected = true;
  MoeWaste waste;  ///< Of all ranks.
  MoeWaste paper;
  LinkModel link;
};

double limit_of(DType dtype) {
  if (dtype == DType::kFloat32) return 1e-5;
  return dtype == DType::kFloat16 ? 8e-3 : 6.4e-2;
}

constexpr std::uint64_t kUpStream = 1'000'000;
constexpr std::uint64_t kDownStream = 2'000'000;

struct ExpertWeights {
  Matrix up;
  Matrix down;
};

/// As a trained layer's, so that values stay near 1.
Matrix scaled_random(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed,
                     std::uint64_t stream) {
  Matrix matrix = random_matrix(rows, cols, dtype, seed, stream);
  std::vector<float> row(static_cast<std::size_t>(cols));
  const float scale = 1.5F / std::sqrt(static_cast<float>(std::max<std::int64_t>(1, cols)));
  for (std::int64_t r = 0; r < rows; ++r) {
    matrix.read_row(r, row.data());
    for (float& value : row) value *= scale;
    matrix.write_row(r, row.data());
  }
  return matrix;
}

ExpertWeights weights_of_expert(const MoeProblem& p, std::int64_t expert) {
  const DType dtype = parse_dtype(p.dtype);
  const auto stream = static_cast<std::uint64_t>(expert);
  return {scaled_random(2 * p.intermediate, p.hidden, dtype, p.seed, kUpStream + stream),
          scaled_random(p.hidden, p.intermediate, dtype, p.seed, kDownStream + stream)};
}

/// One rank's matrices.
class RankData {
 public:
  RankData(const MoeProblem& p, int rank, std::int64_t first_expert, std::int64_t experts)
      : x(random_matrix(p.tokens, p.hidden, parse_dtype(p.dtype), p.seed, static_cast<std::uint64_t>(rank))),
        out(p.tokens, p.hidden, parse_dtype(p.dtype)),
        up(experts * 2 * p.intermediate, p.hidden, parse_dtype(p.dtype)),
        down(experts * p.hidden, p.intermediate, parse_dtype(p.dtype)) {
    std::vector<float> row(static_cast<std::size_t>(std::max(p.hidden, p.intermediate)));
    for (std::int64_t e = 0; e < experts; ++e) {
      const ExpertWeights expert = weights_of_expert(p, first_expert + e);
      copy_into(expert.up, up, e * 2 * p.intermediate, row);
      copy_into(expert.down, down, e * p.hidden, row);
    }
  }
  [[nodiscard]] MoeWeights weights() const { return {up.data(), down.data()}; }

  Matrix x;
  Matrix out;
  Matrix up;
  Matrix down;

 private:
  static void copy_into(const Matrix& from, Matrix& to, std::int64_t first, std::vector<float>& row) {
    for (std::int64_t r = 0; r < from.rows(); ++r) {
      from.read_row(r, row.data());
      to.write_row(first + r, row.data());
    }
  }
};

/// Adds weight * expert(x) in float64.
void add_expert(const MoeProblem& p, const ExpertWeights& expert, const std::vector<float>& x, double weight,
                std::vector<double>& sum) {
  std::vector<float> row(static_cast<std::size_t>(std::max(p.hidden, p.intermediate)));
  const auto dot = [&](const Matrix& matrix, std::int64_t r, const auto& with) {
    matrix.read_row(r, row.data());
    double value = 0;
    for (std::size_t i = 0; i < with.size(); ++i)
      value += static_cast<double>(row[i]) * static_cast<double>(with[i]);
    return value;
  };
  std::vector<double> middle(static_cast<std::size_t>(p.intermediate));
  for (std::int64_t i = 0; i < p.intermediate; ++i) {
    const double gate = dot(expert.up, i, x);
    middle[static_cast<std::size_t>(i)] =
        gate / (1 + std::exp(-gate)) * dot(expert.up, p.intermediate + i, x);
  }
  for (std::int64_t h = 0; h < p.hidden; ++h)
    sum[static_cast<std::size_t>(h)] += weight * dot(expert.down, h, middle);
}

/// A few tokens of this rank in float64, all experts included. Relative to the largest element.
double error_of(const MoeProblem& p, const MoeRouting& routing, const RankData& data, std::int64_t& checked) {
  constexpr std::int64_t kTokens = 3;
  if (p.capacity > 0) return 0;  // which slots count is then not this rank's to know
  double error = 0;
  double largest = 0;
  std::vector<float> x(static_cast<std::size_t>(p.hidden));
  std::vector<float> got(static_cast<std::size_t>(p.hidden));
  for (std::int64_t i = 0; i < std::min(kTokens, routing.tokens); ++i) {
    const std::int64_t token =
        i * (routing.tokens - 1) / std::max<std::int64_t>(1, std::min(kTokens, routing.tokens) - 1);
    data.x.read_row(token, x.data());
    std::vector<double> expected(x.size(), 0);
    for (std::int32_t slot = 0; slot < routing.top_k; ++slot) {
      if (routing.expert(token, slot) < 0) continue;
      add_expert(p, weights_of_expert(p, routing.expert(token, slot)), x,
                 static_cast<double>(routing.weight(token, slot)), expected);
    }
    data.out.read_row(token, got.data());
    for (std::size_t h = 0; h < got.size(); ++h) {
      const double difference = std::abs(static_cast<double>(got[h]) - expected[h]);
      error = std::isnan(difference) ? difference : std::max(error, difference);
      largest = std::max(largest, std::abs(expected[h]));
    }
    ++checked;
  }
  return largest > 0 ? error / largest : error;
}

/// The slowest rank's value of each number.
std::vector<double> slowest(Communicator& communicator, const std::vector<double>& own) {
  std::vector<double> worst = own;
  for (const std::vector<double>& other : gather(communicator, own)) {
    for (std::size_t i = 0; i < worst.size(); ++i) {
      if (!(other[i] <= worst[i])) worst[i] = other[i];
    }
  }
  return worst;
}

std::vector<double> numbers_of(const MoePhases& p) {
  return {p.counts_us, p.gather_us, p.dispatch_us, p.activation_us, p.combine_us, p.reduce_us};
}

MoePhases phases_of(const std::vector<std::vector<double>>& calls) {
  const auto median = [&](std::size_t i) {
    std::vector<double> values;
    for (const auto& call : calls) values.push_back(call[i]);
    return core::median(values);
  };
  return {.counts_us = median(0),
          .gather_us = median(1),
          .dispatch_us = median(2),
          .activation_us = median(3),
          .combine_us = median(4),
          .reduce_us = median(5)};
}

/// Calls of one method: the medians of the slowest rank's whole time and phases.
struct Series {
  std::vector<double> total_us;
  std::vector<std::vector<double>> phases;
  std::vector<double> backlog_us;
  std::vector<double> idle;
  MoeReport last;

  void add(Communicator& communicator, MoeLayer& layer, RankData& data, const MoeRouting& routing,
           Method method) {
    const std::int64_t hidden = layer.options().hidden;
    communicator.exchange(std::uint64_t{0}, {.operation = "start of a measured call"});
    const auto begin = std::chrono::steady_clock::now();
    last = layer.forward(data.x.data(), hidden, routing, data.weights(), data.out.data(), hidden, method);
    const auto end = std::chrono::steady_clock::now();
    std::vector<double> own = numbers_of(last.phases);
    own.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    own.push_back(last.backlog_us);
    own.push_back(last.consumer_idle);
    std::vector<double> worst = slowest(communicator, own);
    idle.push_back(worst.back());
    worst.pop_back();
    backlog_us.push_back(worst.back());
    worst.pop_back();
    total_us.push_back(worst.back());
    phases.push_back(std::move(worst));
  }
};

/// What runs on one rank; rank 0 fills in the result.
void run_rank(const MoeRun& run, const std::shared_ptr<Communicator>& communicator,
              const std::vector<MoeRouting>& routings, MoeResult& result) {
  const MoeProblem& p = run.problem;
  const auto rank = static_cast<std::size_t>(communicator->rank());
  const bool can_put = communicator->symmetric_heap() != nullptr;
  const MoeTransport transport = !p.transport.empty() ? parse_moe_transport(p.transport)
                                 : can_put            ? MoeTransport::kPut
                                                      : MoeTransport::kCollective;
  Context context(communicator, {.num_threads = static_cast<int>(p.threads)});
  MoeLayerOptions options = moe_layer_options(p, transport);
  options.adapt = run.adapt;
  MoeLayer layer(context, options);
  RankData data(p, communicator->rank(), layer.first_expert(), layer.local_experts());
  const MoeRouting& routing = routings[rank];

  // Checked first, each on a poisoned output.
  std::vector<Matrix> outs;
  std::vector<double> own(2, 0);
  std::int64_t checked = 0;
  for (const Method method : {Method::kSerial, Method::kOverlap}) {
    data.out.poison();
    layer.forward(data.x.data(), p.hidden, routing, data.weights(), data.out.data(), p.hidden, method);
    const double error = error_of(p, routing, data, checked);
    if (!(error <= own[0])) own[0] = error;
    outs.push_back(data.out);
  }
  own[1] = outs[0] == outs[1] ? 0 : 1;
  const std::vector<double> worst = slowest(*communicator, own);

  Series serial;
  Series overlap;
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    serial.add(*communicator, layer, data, routing, Method::kSerial);
    overlap.add(*communicator, layer, data, routing, Method::kOverlap);
  }
  const MoeLayer::Parts parts = layer.measure_parts(data.weights());
  const std::vector<double> parts_us = slowest(
      *communicator,
      {parts.dispatch_gemm_us, parts.dispatch_transfer_us, parts.combine_gemm_us, parts.combine_transfer_us});
  if (rank != 0) return;
  result.error = worst[0];
  result.checked = checked;
  result.equals_serial = worst[1] == 0;
  result.same_bits_expected = options.padding == MoePadding::kRagged;
  result.serial_us = core::median(serial.total_us);
  result.overlap_us = core::median(overlap.total_us);
  result.serial = phases_of(serial.phases);
  result.overlap = phases_of(overlap.phases);
  result.parts = {parts_us[0], parts_us[1], parts_us[2], parts_us[3]};
  result.report = overlap.last;
  result.backlog_us = core::median(overlap.backlog_us);
  result.consumer_idle = core::median(overlap.idle);
}

void add_waste(const MoeProblem& problem, const MoeCounts& counts, MoeResult& result) {
  const auto add = [](MoeWaste& sum, const MoeWaste& waste) {
    sum.valid_rows += waste.valid_rows;
    sum.computed_rows += waste.computed_rows;
    sum.bands += waste.bands;
    sum.experts += waste.experts;
  };
  for (std::int32_t rank = 0; rank < problem.ranks; ++rank) {
    MoePlanOptions options = moe_plan_options(problem, rank);
    options.transport = MoeTransport::kPut;
    add(result.waste, moe_waste(options, counts));
    options.padding = MoePadding::kPaper;
    add(result.paper, moe_waste(options, counts));
  }
}

/// Share of a transfer's own time that does not make its GEMM's phase longer.
double hidden_share(double phase_us, double gemm_us, double transfer_us) {
  if (transfer_us <= 0) return 1;
  return std::clamp(1 - (phase_us - gemm_us) / transfer_us, 0.0, 1.0);
}

std::string row_of(const MoePhases& p) {
  return fmt::format(
      "counts {}, gather {}, dispatch + first GEMM {}, activation {}, second GEMM + return {}, sum {}",
      text_of_us(p.counts_us), text_of_us(p.gather_us), text_of_us(p.dispatch_us),
      text_of_us(p.activation_us), text_of_us(p.combine_us), text_of_us(p.reduce_us));
}

bool is_correct(const MoeRun& run, const MoeResult& result) {
  return result.error <= limit_of(parse_dtype(run.problem.dtype)) &&
         (result.equals_serial || !result.same_bits_expected);
}

void print_table(const MoeRun& run, const MoeResult& r) {
  const MoeProblem& p = run.problem;
  const double dispatch =
      hidden_share(r.overlap.dispatch_us, r.parts.dispatch_gemm_us, r.parts.dispatch_transfer_us);
  const double combine =
      hidden_share(r.overlap.combine_us, r.parts.combine_gemm_us, r.parts.combine_transfer_us);
  const bool paced = r.link.bandwidth_gbps > 0 || r.link.latency_us > 0;
  fmt::print(
      "{}",
      to_table({
          {"operator", text_of(p)},
          {"link", paced ? fmt::format("{:.4g} GB/s, {:.4g} us", r.link.bandwidth_gbps, r.link.latency_us)
                         : "not paced"},
          {"layout", fmt::format("{}, {} bands a segment, {} consumers, {} compute threads", p.padding,
                                 r.report.setting.segment_bands, r.report.setting.consumers,
                                 r.report.setting.compute_units)},
          {"", ""},
          {"serial", fmt::format("{}: {}", text_of_us(r.serial_us), row_of(r.serial))},
          {"overlapped", fmt::format("{}: {}", text_of_us(r.overlap_us), row_of(r.overlap))},
          {"speed-up", fmt::format("{:.3f}x", r.serial_us / r.overlap_us)},
          {"second GEMM",
           fmt::format("{:.3f}x with its return: {} alone, {} to send",
                       r.serial.combine_us / r.overlap.combine_us, text_of_us(r.parts.combine_gemm_us),
                       text_of_us(r.parts.combine_transfer_us))},
          {"overlap ratio", fmt::format("{:.3f} of the return, {:.3f} of the dispatch", combine, dispatch)},
          {"consumers",
           fmt::format("backlog {}, idle {:.0f} %", text_of_us(r.backlog_us), 100 * r.consumer_idle)},
          {"wasted rows", fmt::format("{} of {} computed if all tiles cost the same; the paper's padding: "
                                      "{} of {}",
                                      r.waste.wasted_rows(), r.waste.computed_rows, r.paper.wasted_rows(),
                                      r.paper.computed_rows)},
          {"dropped rows", std::to_string(r.report.all_dropped_rows)},
          {"adaptation", r.report.adaptation.empty() ? "off" : r.report.adaptation},
          {"check", fmt::format("{}: largest relative error {:.3g} (limit {:.3g}) in {} tokens, {} the "
                                "serial result",
                                is_correct(run, r) ? "OK" : "WRONG", r.error, limit_of(parse_dtype(p.dtype)),
                                r.checked, r.equals_serial ? "bit for bit" : "not bit for bit")},
      }));
}

nlohmann::ordered_json json_of(const MoePhases& p) {
  return {{"counts_us", p.counts_us},         {"gather_us", p.gather_us},   {"dispatch_us", p.dispatch_us},
          {"activation_us", p.activation_us}, {"combine_us", p.combine_us}, {"reduce_us", p.reduce_us}};
}

void print_as_json(const MoeRun& run, const MoeResult& r) {
  const MoeProblem& p = run.problem;
  print_json({{"operator", "moe-layer"},
              {"ranks", p.ranks},
              {"tokens", p.tokens},
              {"hidden", p.hidden},
              {"intermediate", p.intermediate},
              {"experts", p.experts},
              {"top_k", p.top_k},
              {"routing", p.routing},
              {"dtype", p.dtype},
              {"padding", p.padding},
              {"link_gbps", r.link.bandwidth_gbps},
              {"link_latency_us", r.link.latency_us},
              {"serial_us", r.serial_us},
              {"overlap_us", r.overlap_us},
              {"speedup", r.serial_us / r.overlap_us},
              {"serial_phases", json_of(r.serial)},
              {"overlap_phases", json_of(r.overlap)},
              {"dispatch_overlap_ratio",
               hidden_share(r.overlap.dispatch_us, r.parts.dispatch_gemm_us, r.parts.dispatch_transfer_us)},
              {"combine_overlap_ratio",
               hidden_share(r.overlap.combine_us, r.parts.combine_gemm_us, r.parts.combine_transfer_us)},
              {"backlog_us", r.backlog_us},
              {"consumer_idle", r.consumer_idle},
              {"consumers", r.report.setting.consumers},
              {"segment_bands", r.report.setting.segment_bands},
              {"wasted_rows", r.waste.wasted_rows()},
              {"paper_wasted_rows", r.paper.wasted_rows()},
              {"dropped_rows", r.report.all_dropped_rows},
              {"max_relative_error", r.error},
              {"equals_serial", r.equals_serial},
              {"correct", is_correct(run, r)}});
}

/// A link on which the return takes about as long as the second GEMM.
double balanced_gbps(const MoeRun& run, const std::vector<MoeRouting>& routings, const MoeCounts& counts) {
  const MoeProblem& p = run.problem;
  double gemm_us = 0;
  run_ranks(static_cast<int>(p.ranks), {}, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context(communicator, {.num_threads = static_cast<int>(p.threads)});
    MoeLayer layer(context, moe_layer_options(p, MoeTransport::kPut));
    RankData data(p, communicator->rank(), layer.first_expert(), layer.local_experts());
    const MoeRouting& routing = routings[static_cast<std::size_t>(communicator->rank())];
    layer.forward(data.x.data(), p.hidden, routing, data.weights(), data.out.data(), p.hidden);
    const double us = slowest(*communicator, {layer.measure_parts(data.weights()).combine_gemm_us})[0];
    if (communicator->rank() == 0) gemm_us = us;
  });
  std::int64_t most = 0;
  for (std::int32_t rank = 0; rank < p.ranks; ++rank) {
    std::int64_t rows = 0;
    for (const MoeGroup& group : moe_layout(moe_plan_options(p, rank), counts).groups) {
      if (group.owner != rank) rows += group.rows;
    }
    most = std::max(most, rows);
  }
  const double bytes = static_cast<double>(most * p.hidden * size_of(parse_dtype(p.dtype)));
  return gemm_us > 0 ? bytes / gemm_us * 1e-3 : 0;
}

int run_moe(MoeRun& run) {
  const bool job = is_job();
  MoeProblem& p = run.problem;
  if (job) p.ranks = job_size();
  const std::vector<MoeRouting> routings = make_routings(p);
  const MoeCounts counts = counts_of(routings, p.capacity);
  MoeResult result;
  result.link = run.link;
  add_waste(p, counts, result);
  if (job) {
    result.link = {};
    run_rank(run, job_communicator(p.ranks), routings, result);
    if (!is_first_rank()) return kExitSuccess;
  } else {
    if (run.link_is_auto && p.ranks > 1) {
      constexpr double kAutoLatencyUs = 10;
      result.link = {.bandwidth_gbps = balanced_gbps(run, routings, counts), .latency_us = kAutoLatencyUs};
    }
    InProcessOptions options;
    options.link = result.link;
    run_ranks(static_cast<int>(p.ranks), options, [&](const std::shared_ptr<Communicator>& communicator) {
      run_rank(run, communicator, routings, result);
    });
  }
  if (run.json) {
    print_as_json(run, result);
  } else {
    print_table(run, result);
  }
  return is_correct(run, result) ? kExitSuccess : kExitFailure;
}

}  // namespace

void add_moe_run(CLI::App& parent, Action& action) {
  const auto run = std::make_shared<MoeRun>();
  CLI::App& sub = add_moe_subcommand(parent, std::shared_ptr<MoeProblem>(run, &run->problem),
                                     "Run a mixture-of-experts layer serially and overlapped, and check it");
  add_integer(sub, "--iterations", run->iterations, {1, 1'000'000},
              "Measured calls of each kind; medians are shown")
      ->default_str(std::to_string(run->iterations));
  sub.add_option_function<std::string>(
         "--link-gbps",
         [run](const std::string& text) {
           constexpr double kMax = 1e6;
           run->link_is_auto = text == "auto";
           if (!run->link_is_auto) run->link.bandwidth_gbps = parse_number("--link-gbps", text, 0, kMax);
         },
         "Pace each rank's link to so many 1e9 bytes a second; 0: as fast as memory is;\n"
         "auto: such that the return takes about as long as the second GEMM")
      ->type_name("auto|NUMBER")
      ->default_str("auto");
  constexpr double kMaxLatency = 1e6;
  add_number(sub, "--link-latency-us", run->link.latency_us, 0, kMaxLatency,
             "Latency of each transfer, with a number for --link-gbps")
      ->default_str("0");
  sub.add_flag("--adapt", run->adapt, "Let the layer change consumers and segments between calls");
  sub.add_flag("--json", run->json, "Print one JSON object instead of the table");
  sub.footer("\nExample: flashoverlap run moe-layer --tokens 2048 --experts 16 --ranks 4 --routing stress");
  sub.callback([&sub, run, &action] {
    require_options_behind(sub);
    action = [run] { return run_moe(*run); };
  });
}

}  // namespace flashoverlap::cli
