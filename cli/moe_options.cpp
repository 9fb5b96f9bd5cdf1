#include "moe_options.h"

#include <fmt/format.h>

#include <charconv>
#include <sstream>

#include "core/fail.h"
#include "files.h"
#include "option_values.h"

namespace flashoverlap::cli {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 24U;

/// One line of a routing file: EXPERT or EXPERT:WEIGHT, blanks between.
class LineReader {
 public:
  LineReader(const std::string& path, std::int64_t number) : path_(path), number_(number) {}

  void read(const std::string& line, std::vector<std::int32_t>& experts, std::vector<float>& weights) const {
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      const std::size_t colon = std::min(word.find(':'), word.size());
      experts.push_back(number_in<std::int32_t>(word.substr(0, colon), "an expert"));
      const bool has_weight = colon < word.size();
      weights.push_back(has_weight ? number_in<float>(word.substr(colon + 1), "a weight") : -1.0F);
    }
  }

  [[noreturn]] void refuse(const std::string& what) const {
    core::fail(ErrorKind::kFile, "--routing: '{}', line {}: {}", path_, number_, what);
  }

 private:
  template <typename Number>
  Number number_in(const std::string& text, const char* what) const {
    Number number{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size()) {
      refuse(fmt::format("'{}' is not {}; EXPERT or EXPERT:WEIGHT is expected", text, what));
    }
    return number;
  }

  std::string path_;
  std::int64_t number_;
};

std::vector<MoeRouting> read_routings(MoeProblem& problem) {
  std::istringstream lines(read_file("--routing", problem.routing));
  std::vector<std::int32_t> experts;
  std::vector<float> weights;
  std::int64_t tokens = 0;
  for (std::string line; std::getline(lines, line); ++tokens) {
    const LineReader reader(problem.routing, tokens + 1);
    const std::size_t before = experts.size();
    reader.read(line, experts, weights);
    const auto here = static_cast<std::int64_t>(experts.size() - before);
    if (tokens == 0) problem.top_k = here;
    if (here != problem.top_k || here == 0) {
      reader.refuse(fmt::format("{} experts; {} are expected, as in the first line", here,
                                std::max<std::int64_t>(1, problem.top_k)));
    }
  }
  if (tokens == 0 || tokens % problem.ranks != 0) {
    core::fail(ErrorKind::kFile, "--routing: '{}' has {} tokens; a multiple of the {} ranks is expected",
               problem.routing, tokens, problem.ranks);
  }
  problem.tokens = tokens / problem.ranks;
  std::vector<MoeRouting> routings;
  const auto slots = static_cast<std::ptrdiff_t>(problem.tokens * problem.top_k);
  for (std::ptrdiff_t rank = 0; rank < problem.ranks; ++rank) {
    MoeRouting routing{problem.tokens, problem.experts, static_cast<std::int32_t>(problem.top_k), {}, {}};
    routing.experts.assign(experts.begin() + rank * slots, experts.begin() + (rank + 1) * slots);
    routing.weights.assign(weights.begin() + rank * slots, weights.begin() + (rank + 1) * slots);
    for (float& weight : routing.weights) {
      if (weight == -1.0F) weight = 1.0F / static_cast<float>(problem.top_k);
    }
    try {
      check_routing(routing);
    } catch (const Error& error) {
      core::fail(ErrorKind::kFile, "--routing: '{}', rank {}: {}", problem.routing, rank, error.what());
    }
    routings.push_back(std::move(routing));
  }
  return routings;
}

bool is_kind(const std::string& name) {
  return name == "balanced" || name == "moderate" || name == "stress";
}

MoeOrder order_of(const MoeProblem& problem) {
  if (!problem.order.empty()) return parse_moe_order(problem.order);
  return problem.padding == "ragged" ? MoeOrder::kOwnerMajor : MoeOrder::kExpertMajor;
}

}  // namespace

CLI::App& add_moe_subcommand(CLI::App& parent, const std::shared_ptr<MoeProblem>& problem,
                             const std::string& description) {
  CLI::App& sub = *parent.add_subcommand("moe-layer", description);
  MoeProblem& p = *problem;
  const auto integer = [&](const char* name, std::int64_t& value, std::int64_t least, std::int64_t most,
                           const char* text) {
    add_integer(sub, name, value, {least, most}, text)->default_str(std::to_string(value));
  };
  integer("--tokens", p.tokens, 0, kMost, "Tokens of each rank");
  integer("--hidden", p.hidden, 1, kMost, "Columns of a token");
  integer("--intermediate", p.intermediate, 1, kMost, "Columns between an expert's projections");
  integer("--experts", p.experts, 1, 1 << 16U, "Experts of all ranks");
  integer("--top-k", p.top_k, 1, 64, "Experts of each token");
  sub.add_option("--routing", p.routing,
                 "balanced, moderate, stress, or a file with one line a token: experts")
      ->type_name("KIND|FILE")
      ->default_str(p.routing);
  integer("--ranks", p.ranks, 1, 1024, "Ranks");
  add_choice(sub, "--dtype", p.dtype, {"f32", "bf16", "f16"}, "Element type")->default_str(p.dtype);
  add_integer_or_auto(sub, "--tile-m", p.tile_m, {1, 1 << 16U}, "Rows of a tile")->default_str("auto");
  add_integer_or_auto(sub, "--tile-n", p.tile_n, {1, 1 << 16U}, "Columns of a tile")->default_str("auto");
  add_choice(sub, "--padding", p.padding, {"paper", "ragged", "shared"},
             "What becomes of rows between owners")
      ->default_str(p.padding);
  add_choice(sub, "--order", p.order, {"expert-major", "owner-major"},
             "How owners and experts follow each other; when not given, what suits the padding");
  add_choice(sub, "--transport", p.transport, {"put", "collective"},
             "Puts into the owners' memory, or all-to-alls; when not given, puts where ranks can, on GPUs\n"
             "all-to-alls");
  integer("--segment-bands", p.segment_bands, 1, 1 << 16U, "Row bands of an inner segment");
  integer("--consumers", p.consumers, 1, 64,
          "Streams (SMs on GPUs and in a simulation) that put segments; 16 on GPUs when not given");
  integer("--capacity", p.capacity, 0, std::int64_t{1} << 40U,
          "Rows that an expert takes at most; 0: no limit");
  add_integer_or_auto(sub, "--threads", p.threads, {1, 1024}, "Compute threads of each rank")
      ->default_str("auto");
  add_seed(sub, p.seed);
  return sub;
}

std::vector<MoeRouting> make_routings(MoeProblem& problem) {
  if (!is_kind(problem.routing)) return read_routings(problem);
  if (problem.top_k > problem.experts) {
    throw CLI::ValidationError("--top-k", fmt::format("'{}' is not accepted; expected at most the {} experts",
                                                      problem.top_k, problem.experts));
  }
  std::vector<MoeRouting> routings;
  for (std::int32_t rank = 0; rank < problem.ranks; ++rank) {
    routings.push_back(flashoverlap::make_routing(
        parse_routing_kind(problem.routing), rank, static_cast<std::int32_t>(problem.ranks), problem.tokens,
        problem.experts, static_cast<std::int32_t>(problem.top_k), problem.seed));
  }
  return routings;
}

MoeCounts counts_of(const std::vector<MoeRouting>& routings, std::int64_t capacity) {
  MoeCounts counts{static_cast<std::int32_t>(routings.size()), routings.front().num_experts, {}};
  for (const MoeRouting& routing : routings) {
    const std::vector<std::int64_t> rows = count_rows(routing);
    counts.rows.insert(counts.rows.end(), rows.begin(), rows.end());
  }
  return with_capacity(counts, capacity);
}

MoePlanOptions moe_plan_options(const MoeProblem& problem, std::int32_t rank) {
  MoePlanOptions options;
  options.rank = rank;
  options.world_size = static_cast<std::int32_t>(problem.ranks);
  options.dtype = parse_dtype(problem.dtype);
  options.num_experts = problem.experts;
  options.tile_m = problem.tile_m == 0 ? 128 : problem.tile_m;
  options.tile_n = problem.tile_n == 0 ? 256 : problem.tile_n;
  options.padding = parse_moe_padding(problem.padding);
  options.order = order_of(problem);
  options.transport = problem.transport.empty() ? MoeTransport::kPut : parse_moe_transport(problem.transport);
  options.segment_bands = problem.segment_bands;
  options.resources = {.compute_units = std::max<std::int64_t>(1, problem.threads),
                       .communication_units = problem.consumers};
  return options;
}

MoeLayerOptions moe_layer_options(const MoeProblem& problem, MoeTransport transport) {
  MoeLayerOptions options;
  options.hidden = problem.hidden;
  options.intermediate = problem.intermediate;
  options.num_experts = problem.experts;
  options.dtype = parse_dtype(problem.dtype);
  options.tile_m = problem.tile_m;
  options.tile_n = problem.tile_n;
  options.padding = parse_moe_padding(problem.padding);
  options.order = order_of(problem);
  options.transport = transport;
  options.segment_bands = problem.segment_bands;
  options.consumers = problem.consumers;
  options.capacity = problem.capacity;
  return options;
}

std::string text_of(const MoeProblem& p) {
  return fmt::format("moe-layer hidden={} intermediate={} experts={} top-k={} {}, {} ranks x {} tokens, {}",
                     p.hidden, p.intermediate, p.experts, p.top_k, p.dtype, p.ranks, p.tokens, p.routing);
}

}  // namespace flashoverlap::cli
