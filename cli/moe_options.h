#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/moe_layer.h"

/// `flashoverlap run|plan|simulate moe-layer`: what all three ask.
namespace flashoverlap::cli {

struct MoeProblem {
  std::int64_t tokens = 512;  ///< Of each rank.
  std::int64_t hidden = 256;
  std::int64_t intermediate = 512;
  std::int64_t experts = 8;
  std::int64_t top_k = 2;
  std::string routing = "balanced";  ///< A kind, or a file.
  std::int64_t ranks = 2;
  std::string dtype = "f32";
  std::int64_t tile_m = 0;
  std::int64_t tile_n = 0;
  std::string padding = "ragged";
  std::string order;      ///< Empty: what the padding needs.
  std::string transport;  ///< Empty: put where ranks can, else collective.
  std::int64_t segment_bands = 2;
  std::int64_t consumers = 1;
  std::int64_t capacity = 0;
  std::int64_t threads = 0;
  std::uint64_t seed = 1;
};

/// The subcommand moe-layer of `parent`, with the options that all have.
CLI::App& add_moe_subcommand(CLI::App& parent, const std::shared_ptr<MoeProblem>& problem,
                             const std::string& description);

/// Routings of all ranks. A file has one line a token, the tokens of rank 0 first and equally many of each
/// rank: top-k experts with blanks between, each EXPERT or EXPERT:WEIGHT (without: 1 / top-k); -1 for none.
/// It replaces --tokens and --top-k. Throws Error(kFile) naming file and line.
std::vector<MoeRouting> make_routings(MoeProblem& problem);

MoeCounts counts_of(const std::vector<MoeRouting>& routings, std::int64_t capacity);

/// Tiles that are left open: 128 x 256.
MoePlanOptions moe_plan_options(const MoeProblem& problem, std::int32_t rank);
MoeLayerOptions moe_layer_options(const MoeProblem& problem, MoeTransport transport);

/// "moe-layer hidden=… …".
std::string text_of(const MoeProblem& problem);

void add_moe_run(CLI::App& run, Action& action);
void add_moe_plan(CLI::App& plan, Action& action);
void add_moe_simulate(CLI::App& simulate, Action& action);

}  // namespace flashoverlap::cli
