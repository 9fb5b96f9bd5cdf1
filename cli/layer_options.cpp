#include "layer_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "option_values.h"

namespace flashoverlap::cli {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 20U;

struct LayerText {
  LayerKind kind;
  const char* name;
  const char* description;
};

constexpr std::array kLayers = {
    LayerText{LayerKind::kMlpTpsp, "mlp-tpsp", "MLP with tensor and sequence parallelism"},
    LayerText{LayerKind::kLinearDp, "linear-dp",
              "Linear layer with a weight spread over data-parallel ranks"},
    LayerText{LayerKind::kAttentionTpsp, "attention-tpsp",
              "Attention with tensor and sequence parallelism, split by queries"},
    LayerText{LayerKind::kAttentionUp, "attention-up", "Ulysses attention with its projections"}};

void add_sizes(CLI::App& sub, LayerSizes& sizes) {
  const auto add = [&](const char* name, std::int64_t& value, const char* description) {
    add_integer(sub, name, value, {1, kMost}, description)->default_str(std::to_string(value));
  };
  switch (sizes.kind) {
    case LayerKind::kMlpTpsp:
      add("--tokens", sizes.mlp.tokens, "Of all ranks");
      add("--hidden", sizes.mlp.hidden, "Width of a token");
      add("--inner", sizes.mlp.inner, "Inner width, of all ranks: a multiple of --ranks");
      return;
    case LayerKind::kLinearDp:
      add("--samples", sizes.linear.samples, "Of each rank");
      add("--in", sizes.linear.in, "Input features");
      add("--out", sizes.linear.out, "Output features");
      return;
    case LayerKind::kAttentionTpsp:
    case LayerKind::kAttentionUp: {
      const bool tpsp = sizes.kind == LayerKind::kAttentionTpsp;
      add("--tokens", sizes.attention.tokens, "Of all ranks");
      add("--heads", sizes.attention.heads, tpsp ? "Of all ranks: a multiple of --ranks" : "Of all ranks");
      add("--head-size", sizes.attention.head_size, "Columns of a head");
      return;
    }
  }
}

void require_multiple(const char* name, std::int64_t value, std::int64_t ranks) {
  if (value % ranks == 0) return;
  throw CLI::ValidationError(
      name, fmt::format("'{}' is not accepted; expected a multiple of the {} ranks", value, ranks));
}

}  // namespace

std::string_view name_of(LayerKind kind) {
  return std::ranges::find(kLayers, kind, &LayerText::kind)->name;
}

std::string text_of(const LayerSizes& sizes) {
  if (sizes.kind == LayerKind::kMlpTpsp) {
    return fmt::format("tokens={} hidden={} inner={}", sizes.mlp.tokens, sizes.mlp.hidden, sizes.mlp.inner);
  }
  if (sizes.kind == LayerKind::kLinearDp) {
    return fmt::format("samples={} in={} out={}", sizes.linear.samples, sizes.linear.in, sizes.linear.out);
  }
  return fmt::format("tokens={} heads={} head-size={}", sizes.attention.tokens, sizes.attention.heads,
                     sizes.attention.head_size);
}

void check_sizes(const LayerSizes& sizes, std::int64_t ranks) {
  if (sizes.kind == LayerKind::kMlpTpsp) require_multiple("--inner", sizes.mlp.inner, ranks);
  if (sizes.kind == LayerKind::kAttentionTpsp) require_multiple("--heads", sizes.attention.heads, ranks);
}

void add_layer_subcommands(CLI::App& parent, Action& action,
                           const std::function<Action(CLI::App&, const std::shared_ptr<LayerSizes>&)>& make) {
  for (const LayerText& layer : kLayers) {
    CLI::App& sub = *parent.add_subcommand(layer.name, layer.description);
    const auto sizes = std::make_shared<LayerSizes>();
    sizes->kind = layer.kind;
    add_sizes(sub, *sizes);
    const Action chosen = make(sub, sizes);
    sub.callback([&sub, chosen, &action] {
      require_options_behind(sub);
      action = chosen;
    });
  }
}

}  // namespace flashoverlap::cli
