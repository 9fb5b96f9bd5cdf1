#pragma once

#include <CLI/CLI.hpp>

#include "commands.h"

namespace flashoverlap::cli {

/// `flashoverlap run mlp-tpsp|linear-dp|attention-tpsp|attention-up`.
void add_layer_run(CLI::App& parent, Action& action);
/// `flashoverlap simulate …` of the same.
void add_layer_simulate(CLI::App& parent, Action& action);

}  // namespace flashoverlap::cli
