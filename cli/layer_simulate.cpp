#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "exit_codes.h"
#include "format.h"
#include "layer_options.h"
#include "layer_run.h"
#include "option_values.h"
#include "sliced_simulate.h"

/// `flashoverlap simulate mlp-tpsp|linear-dp|attention-tpsp|attention-up`: a layer is two operators, one
/// after the other. Attention is priced as its two products; activations and the softmax are not.
namespace flashoverlap::cli {
namespace {

struct LayerSimulation {
  std::int64_t ranks = 2;
  std::string dtype = "f32";
  std::int64_t baseline_slices = 4;
  std::string machine;
  bool json = false;
};

struct LayerOperators {
  SlicedProblem first, second;
  double flops_between = 0;  ///< Of the rank with most.
};

std::int64_t hidden_of(const layers::AttentionShape& shape) {
  return shape.heads * shape.head_size;
}

/// Of q · k^T and the scores · v, for all queries.
double attention_flops(const layers::AttentionShape& shape, std::int64_t heads) {
  return 4.0 * static_cast<double>(shape.tokens) * static_cast<double>(shape.tokens) *
         static_cast<double>(heads * shape.head_size);
}

SlicedProblem problem_of(const LayerSimulation& s, plan::SlicedOp op, std::int64_t m, std::int64_t n,
                         std::int64_t k) {
  SlicedProblem problem;
  problem.op = op;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.ranks = s.ranks;
  problem.dtype = s.dtype;
  problem.baseline_slices = s.baseline_slices;
  return problem;
}

// Attention of a query comes right before its row of the output projection, so that it hides what the
// projection hides: columns of A that cost as much.
LayerOperators attention_tpsp(const layers::AttentionShape& shape, const LayerSimulation& s) {
  const std::int64_t hidden = hidden_of(shape);
  const std::int64_t own = hidden / s.ranks;
  const std::int64_t as_columns = 2 * shape.tokens * own / hidden;
  return {.first = problem_of(s, SlicedOp::kAllGatherGemm, shape.tokens, 3 * own, hidden),
          .second = problem_of(s, SlicedOp::kReduceScatter, shape.tokens, hidden, own + as_columns)};
}

LayerOperators attention_up(const layers::AttentionShape& shape, const LayerSimulation& s) {
  const std::int64_t hidden = hidden_of(shape);
  LayerOperators operators{.first = problem_of(s, SlicedOp::kHeads, shape.tokens, 3 * hidden, hidden),
                           .second = problem_of(s, SlicedOp::kFromHeads, shape.tokens, hidden, hidden)};
  const std::vector<std::int64_t> begins = slice_begins({}, shape.heads, static_cast<std::int32_t>(s.ranks));
  for (std::size_t rank = 0; rank + 1 < begins.size(); ++rank) {
    const std::int64_t heads = begins[rank + 1] - begins[rank];
    operators.first.slices.push_back(heads * 3 * shape.head_size);
    operators.second.slices.push_back(heads * shape.head_size);
    operators.flops_between = std::max(operators.flops_between, attention_flops(shape, heads));
  }
  return operators;
}

LayerOperators operators_of(const LayerSizes& sizes, const LayerSimulation& s) {
  switch (sizes.kind) {
    case LayerKind::kMlpTpsp: {
      const auto& [tokens, hidden, inner] = sizes.mlp;
      return {.first = problem_of(s, SlicedOp::kAllGatherGemm, tokens, inner / s.ranks, hidden),
              .second = problem_of(s, SlicedOp::kReduceScatter, tokens, hidden, inner / s.ranks)};
    }
    case LayerKind::kLinearDp: {
      const auto& [samples, in, out] = sizes.linear;
      return {.first = problem_of(s, SlicedOp::kShardedWeight, samples, out, in),
              .second = problem_of(s, SlicedOp::kGradient, out, in, samples)};
    }
    case LayerKind::kAttentionTpsp:
      return attention_tpsp(sizes.attention, s);
    case LayerKind::kAttentionUp:
      break;
  }
  return attention_up(sizes.attention, s);
}

/// As long as the first operator's GEMM takes for so many operations; that of the rank with most rows.
double time_between_us(const LayerOperators& operators, const SimulatedSlices& first) {
  const SlicedProblem& p = first.problem;
  const std::int64_t rows = (p.m + p.ranks - 1) / p.ranks;
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(p.n) * static_cast<double>(p.k);
  return operators.flops_between / flops * first.methods.serial.alone_us;
}

SimulatedMethod sum(const SimulatedMethod& first, const SimulatedMethod& second, double between_us) {
  return {.total_us = first.total_us + between_us + second.total_us,
          .alone_us = first.alone_us + between_us + second.alone_us,
          .exposed_us = first.exposed_us + second.exposed_us,
          .communicating_us = first.communicating_us + second.communicating_us};
}

int simulate_layer(const LayerSizes& sizes, const LayerSimulation& s) {
  const MachineProfile machine = machine_of(s.machine);
  check_sizes(sizes, s.ranks);
  const LayerOperators operators = operators_of(sizes, s);
  const SimulatedSlices first = simulate_slices(operators.first, machine);
  const SimulatedSlices second = simulate_slices(operators.second, machine);
  const double between_us = operators.flops_between > 0 ? time_between_us(operators, first) : 0;
  const auto both = [&](SimulatedMethod SimulatedMethods::*method) {
    return sum(first.methods.*method, second.methods.*method, between_us);
  };
  const SimulatedMethod overlap = both(&SimulatedMethods::overlap);
  const SimulatedMethod sliced = both(&SimulatedMethods::sliced);
  const SimulatedMethod serial = both(&SimulatedMethods::serial);
  const double communication_us = serial.communicating_us;
  if (s.json) {
    print_json({{"simulated", true},
                {"machine", machine.name},
                {"layer", name_of(sizes.kind)},
                {"shape", text_of(sizes)},
                {"ranks", s.ranks},
                {"dtype", s.dtype},
                {"computation_us", overlap.alone_us},
                {"communication_us", communication_us},
                {"serial_us", serial.total_us},
                {"sliced_us", sliced.total_us},
                {"overlap_us", overlap.total_us},
                {"exposed_us", overlap.exposed_us},
                {"exposed_share", overlap.share_of(communication_us)},
                {"sliced_exposed_us", sliced.exposed_us},
                {"sliced_exposed_share", sliced.share_of(communication_us)}});
    return kExitSuccess;
  }
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"layer", fmt::format("{}  {} {}, {} rank{}", name_of(sizes.kind), text_of(sizes), s.dtype, s.ranks,
                            s.ranks == 1 ? "" : "s")},
      {"machine", fmt::format("{} ({}), simulated", machine.name, machine.provenance.kind)},
      {"first", fmt::format("{}: {}", name_of(first.problem.op), first.parts)},
      {"second", fmt::format("{}: {}", name_of(second.problem.op), second.parts)},
      {"", ""},
      {"computation alone", text_of_us(overlap.alone_us)},
      {"communication", text_of_us(communication_us) + "  (as collectives)"},
      {"serial", text_of(serial, communication_us)},
      {fmt::format("{} slices", s.baseline_slices), text_of(sliced, communication_us)},
      {"tail-free", text_of(overlap, communication_us)}};
  fmt::print("{}", to_table(rows));
  return kExitSuccess;
}

}  // namespace

void add_layer_simulate(CLI::App& parent, Action& action) {
  add_layer_subcommands(parent, action, [](CLI::App& sub, const std::shared_ptr<LayerSizes>& sizes) {
    const auto s = std::make_shared<LayerSimulation>();
    const auto integer = [&](const char* name, std::int64_t& value, IntegerRange range, const char* text) {
      add_integer(sub, name, value, range, text)->default_str(std::to_string(value));
    };
    integer("--ranks", s->ranks, {1, 64}, "World size");
    add_choice(sub, "--dtype", s->dtype, {"f32", "bf16", "f16"}, "Element type")->default_str(s->dtype);
    integer("--baseline-slices", s->baseline_slices, {1, 1024},
            "Slices of the baseline with one collective for each");
    sub.add_option("--machine", s->machine, "A file, or a shipped profile")->type_name("NAME|FILE");
    sub.add_flag("--json", s->json, "Print one JSON object instead of the table");
    return Action([s, sizes] { return simulate_layer(*sizes, *s); });
  });
}

}  // namespace flashoverlap::cli
