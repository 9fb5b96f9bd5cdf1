#include "moe_splits.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/median.h"
#include "format.h"

namespace flashoverlap::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Of an inner segment.
constexpr std::int64_t kBands[] = {1, 2, 4, 8};

MoeSplitTimes measure_routing(const MoeRun& run, std::size_t routing, SplitLayer& adapted,
                              const std::vector<std::unique_ptr<SplitLayer>>& layers) {
  MoeSplitTimes times;
  for (int i = 0; i < kSettlingCalls; ++i) {
    const MoeReport report = adapted.call(routing);
    times.adaptation.push_back(report.adaptation);
    times.setting = report.setting;
  }
  for (const auto& layer : layers) (void)layer->call(routing);  // makes its plans
  std::vector<std::vector<double>> us(layers.size() + 1);
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    for (std::size_t s = 0; s < layers.size(); ++s) us[s].push_back(layers[s]->time_us(routing));
    us.back().push_back(adapted.time_us(routing));
  }
  for (std::size_t s = 0; s < layers.size(); ++s) times.static_us.push_back(core::median(us[s]));
  times.adapted_us = core::median(us.back());
  std::vector<double> shares;
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    const double best_us = layers[times.best()]->time_us(routing);
    shares.push_back(adapted.time_us(routing) / best_us);
  }
  times.adapted_share = core::median(shares);
  return times;
}

std::string text_of(const MoeSetting& split) {
  return fmt::format("{} consumers, {} bands", split.consumers, split.segment_bands);
}

Json json_of(const MoeSetting& split) {
  return {{"consumers", split.consumers}, {"segment_bands", split.segment_bands}};
}

Json json_of(const MoeSplits& splits, std::size_t routing) {
  const MoeSplitTimes& times = splits.times[routing];
  Json json = {{"routing", splits.routings[routing]}};
  for (std::size_t s = 0; s < splits.splits.size(); ++s) {
    Json split = json_of(splits.splits[s]);
    split["us"] = times.static_us[s];
    json["static"].push_back(split);
  }
  json["best"] = json_of(splits.splits[times.best()]);
  json["best_us"] = times.static_us[times.best()];
  json["adapted"] = json_of(times.setting);
  json["adapted_us"] = times.adapted_us;
  json["adapted_share"] = times.adapted_share;
  json["adaptation"] = times.adaptation;
  return json;
}

void print_row(const std::string& name, const MoeSplits& splits,
               const std::function<std::string(const MoeSplitTimes&)>& cell) {
  fmt::print("{:<28}", name);
  for (const MoeSplitTimes& times : splits.times) fmt::print("  {:>24}", cell(times));
  fmt::print("\n");
}

MoeSplits splits_of(const MoeRun& run) {
  MoeSplits splits;
  for (const std::int64_t consumers : run.splits) {
    for (const std::int64_t bands : kBands)
      splits.splits.push_back({.consumers = consumers, .compute_units = 1, .segment_bands = bands});
  }
  splits.from = {
      .consumers = run.problem.consumers, .compute_units = 1, .segment_bands = run.problem.segment_bands};
  splits.routings = {run.problem.routing};
  splits.routings.insert(splits.routings.end(), run.then.begin(), run.then.end());
  return splits;
}

}  // namespace

std::size_t MoeSplitTimes::best() const {
  return static_cast<std::size_t>(std::ranges::min_element(static_us) - static_us.begin());
}

std::vector<std::vector<MoeRouting>> routings_in_turn(MoeRun& run) {
  std::vector<std::vector<MoeRouting>> routings = {make_routings(run.problem)};
  for (const std::string& then : run.then) {
    MoeProblem problem = run.problem;
    problem.routing = then;
    routings.push_back(make_routings(problem));
  }
  return routings;
}

std::vector<const MoeRouting*> routings_of(const std::vector<std::vector<MoeRouting>>& routings, int rank) {
  std::vector<const MoeRouting*> own;
  for (const std::vector<MoeRouting>& all : routings) own.push_back(&all[static_cast<std::size_t>(rank)]);
  return own;
}

MoeLayerOptions with_split(MoeLayerOptions options, const MoeSetting* split) {
  options.adapt = split == nullptr;
  if (split == nullptr) return options;
  options.consumers = split->consumers;
  options.segment_bands = split->segment_bands;
  return options;
}

MoeSplits measure_splits(const MoeRun& run,
                         const std::function<std::unique_ptr<SplitLayer>(const MoeSetting*)>& make) {
  MoeSplits splits = splits_of(run);
  const std::unique_ptr<SplitLayer> adapted = make(nullptr);
  std::vector<std::unique_ptr<SplitLayer>> layers;
  for (const MoeSetting& split : splits.splits) layers.push_back(make(&split));
  for (std::size_t r = 0; r < splits.routings.size(); ++r)
    splits.times.push_back(measure_routing(run, r, *adapted, layers));
  return splits;
}

void print_splits(const MoeRun& run, const std::string& backend, const MoeSplits& splits, bool json) {
  if (json) {
    Json all = {{"operator", "moe-layer"}, {"backend", backend}, {"from", json_of(splits.from)}};
    for (std::size_t r = 0; r < splits.routings.size(); ++r) all["routings"].push_back(json_of(splits, r));
    return print_json(all);
  }
  fmt::print("{}\nbackend {}; a call of the layer, and the adapted one's after {} calls with each routing\n",
             flashoverlap::cli::text_of(run.problem), backend, kSettlingCalls);
  fmt::print("{:<28}", "");
  for (const std::string& routing : splits.routings) fmt::print("  {:>24}", routing);
  fmt::print("\n");
  for (std::size_t s = 0; s < splits.splits.size(); ++s) {
    print_row(text_of(splits.splits[s]), splits,
              [&](const MoeSplitTimes& times) { return text_of_us(times.static_us[s]); });
  }
  print_row("best", splits, [&](const MoeSplitTimes& t) { return text_of(splits.splits[t.best()]); });
  print_row("adapted, from " + text_of(splits.from), splits,
            [](const MoeSplitTimes& t) { return text_of_us(t.adapted_us); });
  print_row("to", splits, [](const MoeSplitTimes& t) { return text_of(t.setting); });
  print_row("over the best", splits,
            [](const MoeSplitTimes& t) { return fmt::format("{:.3f}x", t.adapted_share); });
}

}  // namespace flashoverlap::cli
