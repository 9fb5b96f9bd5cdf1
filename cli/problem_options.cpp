#include "problem_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <optional>
#include <random>

#include "core/fail.h"
#include "option_values.h"
#include "process_ranks.h"

namespace flashoverlap::cli {
namespace {

constexpr IntegerRange kSizes{0, std::int64_t{1} << 40};
constexpr IntegerRange kTiles{1, std::int64_t{1} << 40};
constexpr IntegerRange kCounts{1, 1024};  // Ranks and threads are threads of this process.

Op parse_op(const std::string& name) {
  require_choice("OP", name, op_names());
  const auto index = std::find(op_names().begin(), op_names().end(), name) - op_names().begin();
  return static_cast<Op>(index);
}

void add_shape_options(CLI::App& app, ProblemOptions& options) {
  add_integer(app, "-m,--m", options.m, kSizes, "Rows of A and of the product on each rank")
      ->default_str(std::to_string(options.m));
  add_integer(app, "-n,--n", options.n, kSizes, "Rows of B, columns of the product")
      ->default_str(std::to_string(options.n));
  add_integer(app, "-k,--k", options.k, kSizes, "Columns of A and B on each rank")
      ->default_str(std::to_string(options.k));
  add_integer(app, "--ranks", options.ranks, kCounts, "World size: ranks are threads of this process")
      ->default_str(std::to_string(options.ranks));
  add_integer_or_auto(app, "--threads", options.threads, kCounts,
                      "Compute threads of each rank; auto: cores / ranks, at least 1")
      ->default_str("auto");
}

void add_tiling_options(CLI::App& app, ProblemOptions& options) {
  add_integer_or_auto(app, "--tile-m", options.tile_m, kTiles, "Rows of a tile")->default_str("auto");
  add_integer_or_auto(app, "--tile-n", options.tile_n, kTiles, "Columns of a tile")->default_str("auto");
  add_integer_or_auto(app, "--swizzle", options.swizzle, kTiles,
                      "Tile rows that are walked together, column by column; 1: row by row")
      ->default_str("auto");
  app.add_option_function<std::string>(
         "--partition",
         [&options](const std::string& text) {
           options.partition =
               text == "auto" ? std::vector<std::int64_t>{} : parse_integer_list("--partition", text, kTiles);
         },
         "Waves of each group, for example 1,2,2; they must sum to the plan's waves")
      ->type_name("auto|LIST")
      ->default_str("auto");
}

/// Options that only some operators have: given to another one they are an error, not ignored.
struct OperatorOptions {
  CLI::Option* rows = nullptr;
  CLI::Option* skew = nullptr;
  CLI::Option* rows_to_rank = nullptr;
  CLI::Option* method = nullptr;
  std::vector<CLI::Option*> with_method;
};

OverlapMethod parse_method(const std::string& text) {
  require_choice("--method", text, {"signal", "tail-free", "auto"});
  return text == "signal"      ? OverlapMethod::kSignal
         : text == "tail-free" ? OverlapMethod::kTailFree
                               : OverlapMethod::kAuto;
}

void add_method_options(CLI::App& app, ProblemOptions& options, OperatorOptions& added) {
  added.method = app.add_option_function<std::string>(
      "--method", [&options](const std::string& text) { options.method = parse_method(text); },
      "gemm-reduce-scatter: how it is overlapped, compared with a baseline in slices:\n"
      "wave groups that signal (the default, without that baseline), direct transfers\n"
      "with no tail, or what is quickest on the machine that is known, else tail-free");
  added.method->type_name("signal|tail-free|auto");
  CLI::Option* slices = app.add_option_function<std::string>(
      "--slices",
      [&options](const std::string& text) {
        options.slices.sizes = parse_integer_list("--slices", text, kSizes);
      },
      "With --method: rows of each rank's slice; when not given, equal");
  slices->type_name("LIST");
  CLI::Option* parts = add_integer_or_auto(app, "--parts", options.slices.parts, kTiles,
                                           "With --method tail-free: transfers that a slice is cut into");
  parts->default_str("auto");
  constexpr IntegerRange kChannels{1, 63};
  CLI::Option* channels =
      add_integer_or_auto(app, "--send-channels", options.slices.send_channels, kChannels,
                          "With --method tail-free: slices that a rank may be sending at a time");
  channels->default_str("auto");
  CLI::Option* baseline = add_integer(app, "--baseline-slices", options.baseline_slices, kCounts,
                                      "With --method: slices of the baseline with one collective for each");
  baseline->default_str(std::to_string(options.baseline_slices));
  added.with_method = {slices, parts, channels, baseline};
}

OperatorOptions add_operator_options(CLI::App& app, ProblemOptions& options) {
  OperatorOptions added;
  added.rows = app.add_option_function<std::string>(
      "--rows",
      [&options](const std::string& text) {
        require_choice("--rows", text, {"contiguous", "block-cyclic"});
        options.rows = text == "contiguous" ? RowOwnership::kContiguous : RowOwnership::kBlockCyclic;
      },
      "gemm-reduce-scatter: which rows of the sum a rank keeps");
  added.rows->type_name("contiguous|block-cyclic")->default_str("contiguous");
  added.skew =
      add_number(app, "--skew", options.skew, 0, 1,
                 "gemm-all-to-all: this share of each rank's rows goes to rank 0, the rest evenly to all");
  added.skew->default_str("0");
  added.rows_to_rank = app.add_option_function<std::string>(
      "--rows-to-rank",
      [&options](const std::string& text) {
        options.rows_to_rank = parse_integer_list("--rows-to-rank", text, kSizes);
      },
      "gemm-all-to-all: how many of its rows each rank sends to rank 0, 1, …; they sum to m");
  added.rows_to_rank->type_name("LIST");
  added.rows_to_rank->excludes(added.skew);
  return added;
}

void require_op(const CLI::Option* option, Op op, Op accepted) {
  if (option->count() == 0 || op == accepted) return;
  throw CLI::ValidationError(option->get_name(),
                             fmt::format("does not apply to {}; only to {}", name_of(op), name_of(accepted)));
}

void check_method(const OperatorOptions& added, const ProblemOptions& options) {
  if (added.method == nullptr) return;
  require_op(added.method, options.op, Op::kGemmReduceScatter);
  for (const CLI::Option* option : added.with_method) {
    require_op(option, options.op, Op::kGemmReduceScatter);
    if (option->count() == 0 || options.method) continue;
    throw CLI::ValidationError(option->get_name(), "is for --method signal, tail-free or auto");
  }
  if (!options.method || options.rows == RowOwnership::kContiguous) return;
  throw CLI::ValidationError("--rows",
                             "block-cyclic does not go with --method: rank r keeps slice r of the rows");
}

void check_number_of_threads(const ProblemOptions& options) {
  constexpr std::int64_t kMaxThreads = 4096;
  if (options.ranks * options.threads <= kMaxThreads) return;
  throw CLI::ValidationError(
      "--threads", fmt::format("{} for each of --ranks {} are not accepted; expected at most {} together",
                               options.threads, options.ranks, kMaxThreads));
}

void check_rows_to_rank(ProblemOptions& options, bool m_is_given) {
  const std::vector<std::int64_t>& counts = options.rows_to_rank;
  if (counts.empty()) return;
  if (std::ssize(counts) != options.ranks) {
    throw CLI::ValidationError(
        "--rows-to-rank",
        fmt::format("has {} numbers; expected one for each of --ranks {}", counts.size(), options.ranks));
  }
  const std::int64_t sum = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  if (m_is_given && sum != options.m) {
    throw CLI::ValidationError("--rows-to-rank", fmt::format("sums to {}; expected --m {}", sum, options.m));
  }
  options.m = sum;
}

double available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string key; file >> key;) {
    double kib = 0;
    if (key == "MemAvailable:" && file >> kib) return kib * 1024;
  }
  return INFINITY;
}

}  // namespace

std::string_view name_of(Op op) {
  return op_names()[static_cast<std::size_t>(op)];
}

const std::vector<std::string>& op_names() {
  static const std::vector<std::string> names{"gemm-all-reduce", "gemm-reduce-scatter", "gemm-all-to-all"};
  return names;
}

void add_problem_options(CLI::App& app, const std::shared_ptr<ProblemOptions>& options,
                         MethodOptions method) {
  app.add_option_function<std::string>(
         "OP", [options](const std::string& text) { options->op = parse_op(text); },
         "gemm-all-reduce, gemm-reduce-scatter or gemm-all-to-all")
      ->default_str("gemm-all-reduce");
  add_shape_options(app, *options);
  app.add_option_function<std::string>(
         "--dtype",
         [options](const std::string& text) {
           require_choice("--dtype", text, {"f32", "bf16", "f16"});
           options->dtype = parse_dtype(text);
         },
         "Element type of matrices and messages; sums are always f32")
      ->type_name("f32|bf16|f16")
      ->default_str("f32");
  add_tiling_options(app, *options);
  OperatorOptions added = add_operator_options(app, *options);
  if (method == MethodOptions::kPresent) add_method_options(app, *options, added);
  add_seed(app, options->seed)->default_str("1");
  app.parse_complete_callback([&app, options, added] {
    check_number_of_threads(*options);
    require_op(added.rows, options->op, Op::kGemmReduceScatter);
    require_op(added.skew, options->op, Op::kGemmAllToAll);
    require_op(added.rows_to_rank, options->op, Op::kGemmAllToAll);
    check_rows_to_rank(*options, app.count("--m") > 0);
    check_method(added, *options);
  });
}

void require_runnable(const ProblemOptions& options) {
  constexpr std::int64_t kMostRanks = 64;
  if (options.method != OverlapMethod::kTailFree || options.ranks <= kMostRanks) return;
  throw CLI::ValidationError(
      "--method",
      fmt::format("tail-free takes a thread for each pair of ranks, so at most {} ranks; --ranks is {}",
                  kMostRanks, options.ranks));
}

Routing make_routing(const ProblemOptions& options) {
  Routing routing;
  if (options.op != Op::kGemmAllToAll) return routing;
  const auto ranks = static_cast<std::size_t>(options.ranks);
  std::vector<std::int64_t> counts = options.rows_to_rank;
  if (counts.empty()) {
    const auto to_first =
        static_cast<std::int64_t>(std::llround(options.skew * static_cast<double>(options.m)));
    const std::int64_t rest = options.m - to_first;
    for (std::int64_t d = 0; d < options.ranks; ++d) {
      counts.push_back(rest / options.ranks + (d < rest % options.ranks ? 1 : 0));
    }
    counts[0] += to_first;
  }
  std::vector<std::int32_t> sorted;
  for (std::size_t d = 0; d < ranks; ++d) {
    sorted.insert(sorted.end(), static_cast<std::size_t>(counts[d]), static_cast<std::int32_t>(d));
  }
  for (std::size_t source = 0; source < ranks; ++source) {
    std::mt19937_64 random(options.seed * 1'000'003 + source);
    std::shuffle(sorted.begin(), sorted.end(), random);
    routing.destinations.push_back(sorted);
  }
  return routing;
}

GemmOptions gemm_options(const ProblemOptions& options) {
  return {.m = options.m,
          .n = options.n,
          .k = options.k,
          .dtype = options.dtype,
          .tile_m = options.tile_m,
          .tile_n = options.tile_n,
          .swizzle = options.swizzle,
          .partition = options.partition};
}

ContextOptions context_options(const ProblemOptions& options) {
  ContextOptions context;
  context.num_threads = static_cast<int>(options.threads);
  return context;
}

void require_memory(double bytes) {
  const double available = available_memory_bytes();
  if (bytes <= available) return;
  constexpr double kGib = 1024.0 * 1024 * 1024;
  core::fail(ErrorKind::kOutOfMemory,
             "--m, --n, --k, --ranks, --tile-m, --tile-n: this takes about {:.3g} GiB of memory; {:.3g} GiB "
             "are available",
             bytes / kGib, available / kGib);
}

double memory_estimate(const ProblemOptions& options) {
  const auto m = static_cast<double>(options.m);
  const auto n = static_cast<double>(options.n);
  const auto k = static_cast<double>(options.k);
  const auto ranks = static_cast<double>(options.ranks);
  // A, B, the output, its packed copy and what has been received.
  const double elements = m * k + n * k + 3 * m * n;
  // Tile sizes that the operator chooses are well above this; one tile takes about so many bytes of plan and
  // tables.
  constexpr double kSmallestChosenTile = 32;
  constexpr double kBytesPerTile = 512;
  const double tile_m = options.tile_m > 0 ? static_cast<double>(options.tile_m) : kSmallestChosenTile;
  const double tile_n = options.tile_n > 0 ? static_cast<double>(options.tile_n) : kSmallestChosenTile;
  const double tiles = std::ceil(m / tile_m) * std::ceil(n / tile_n);
  return ranks * (elements * static_cast<double>(size_of(options.dtype)) + tiles * kBytesPerTile + 8 * m);
}

void run_problem(const ProblemOptions& options, const LinkModel& link,
                 const std::function<void(const std::shared_ptr<Communicator>&)>& function) {
  InProcessOptions in_process;
  in_process.link = link;
  try {
    if (options.is_job) return function(job_communicator(options.ranks));
    run_ranks(static_cast<int>(options.ranks), in_process, function);
  } catch (const Error& error) {
    // The library checks the partition, since only it knows the number of waves. Every rank says the same of
    // it.
    const std::string message = error.what();
    const std::size_t place = message.find("partition");
    if (options.partition.empty() || error.kind() != ErrorKind::kBadArgument || place == std::string::npos)
      throw;
    core::fail(ErrorKind::kBadArgument, "--partition: {}", message.substr(place));
  }
}

std::unique_ptr<GemmOperator> make_operator(Context& context, const ProblemOptions& options,
                                            const Routing& routing) {
  context.set_tuner(options.tuner);
  const GemmOptions gemm = gemm_options(options);
  switch (options.op) {
    case Op::kGemmAllReduce:
      return std::make_unique<GemmAllReduce>(context, gemm);
    case Op::kGemmReduceScatter:
      if (options.method) {
        return std::make_unique<GemmReduceScatter>(context, gemm, *options.method, options.slices,
                                                   BaselineOptions{options.baseline_slices});
      }
      return std::make_unique<GemmReduceScatter>(context, gemm, options.rows);
    case Op::kGemmAllToAll: {
      const auto rank = static_cast<std::size_t>(context.communicator().rank());
      return std::make_unique<GemmAllToAll>(context, gemm, routing.destinations[rank]);
    }
  }
  core::fail(ErrorKind::kInternal, "operator {} is not known here", static_cast<int>(options.op));
}

}  // namespace flashoverlap::cli
