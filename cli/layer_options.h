#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "commands.h"
#include "layers/layer.h"

/// `flashoverlap run|simulate mlp-tpsp|linear-dp|attention-tpsp|attention-up`: what both ask.
namespace flashoverlap::cli {

enum class LayerKind { kMlpTpsp, kLinearDp, kAttentionTpsp, kAttentionUp };

/// A layer; the sizes of its kind are those that count.
struct LayerSizes {
  LayerKind kind = LayerKind::kMlpTpsp;
  layers::MlpShape mlp{1024, 256, 1024};
  layers::LinearShape linear{512, 512, 1024};
  layers::AttentionShape attention{512, 8, 32};
};

std::string_view name_of(LayerKind kind);
/// "tokens=… hidden=… inner=…".
std::string text_of(const LayerSizes& sizes);
/// Throws CLI::ValidationError where the layer needs a multiple of the ranks.
void check_sizes(const LayerSizes& sizes, std::int64_t ranks);

/// One subcommand of `parent` for each layer; `make` gets the subcommand and the sizes, adds options of its
/// own and returns what is to be done.
void add_layer_subcommands(CLI::App& parent, Action& action,
                           const std::function<Action(CLI::App&, const std::shared_ptr<LayerSizes>&)>& make);

}  // namespace flashoverlap::cli
