#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include "flashoverlap/plan.h"
#include "plan/arithmetic.h"
#include "plan/verify.h"

namespace flashoverlap {
namespace {

using plan::index;
using Out = std::back_insert_iterator<std::string>;

constexpr std::int64_t kMaxMapRows = 32;
constexpr std::int64_t kMaxMapCols = 16;
constexpr std::int64_t kMaxTableRows = 32;

/// a, b, …, z, aa, ab, …
std::string group_letters(std::int64_t group) {
  std::string letters;
  for (++group; group > 0; group = (group - 1) / 26)
    letters.insert(letters.begin(), static_cast<char>('a' + (group - 1) % 26));
  return letters;
}

void print_header(const OverlapPlan& plan, Out out) {
  fmt::format_to(out, "{} plan of rank {} of {}\n", plan.operation, plan.rank, plan.world_size);
  fmt::format_to(out, "  product    {} x {} x {} (m x n x k), {}\n", plan.grid.rows(), plan.grid.cols(),
                 plan.grid.k(), name_of(plan.dtype));
  fmt::format_to(out, "  output     {} x {}", plan.output_rows, plan.output_cols);
  if (plan.output_row_shift != 0 || plan.output_col_shift != 0) {
    fmt::format_to(out, ", product row {} and column {} at its corner", -plan.output_row_shift,
                   -plan.output_col_shift);
  }
  fmt::format_to(out, "\n");
  fmt::format_to(out, "  tiles      {} of {} x {} in {} problem{}\n", plan.grid.num_tiles(),
                 plan.grid.tile_m(), plan.grid.tile_n(), plan.grid.problems().size(),
                 plan.grid.problems().size() == 1 ? "" : "s");
  fmt::format_to(out, "  waves      {} of {} compute unit{}", plan.num_waves(), plan.resources.compute_units,
                 plan.resources.compute_units == 1 ? "" : "s");
  if (plan.resources.communication_units > 0) {
    fmt::format_to(out, ", {} for communication", plan.resources.communication_units);
  }
  fmt::format_to(out, "\n  partition  {}\n",
                 plan.groups.empty() ? "none" : fmt::format("{}", fmt::join(plan.partition(), ",")));
  fmt::format_to(out, "  buffers    {} packed, {} received (elements)\n", plan.packed_size,
                 plan.received_size);
  fmt::format_to(out, "  agreement  {:016x}\n", plan.agreement);
}

struct MapProblem {
  std::int64_t first_tile = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

/// A cell such as "12c": the tile is in wave 12, group c.
void print_map_rows(const OverlapPlan& plan, const std::vector<std::string>& cells, const MapProblem& problem,
                    std::int64_t rows, std::size_t width, Out out) {
  const std::int64_t cols = std::min(problem.cols, kMaxMapCols);
  for (std::int64_t row = 0; row < rows; ++row) {
    const Tile& tile = plan.grid.tile(problem.first_tile + row * problem.cols);
    fmt::format_to(out, "  row {:>8} ", tile.row_begin);
    for (std::int64_t col = 0; col < cols; ++col) {
      fmt::format_to(out, " {:>{}}", cells[index(problem.first_tile + row * problem.cols + col)], width);
    }
    fmt::format_to(out, "{}\n", cols < problem.cols ? " ..." : "");
  }
  if (rows < problem.rows || cols < problem.cols) {
    fmt::format_to(out, "  ... {} of {} tile rows and {} of {} tile columns shown\n", rows, problem.rows,
                   cols, problem.cols);
  }
}

void print_map(const OverlapPlan& plan, Out out) {
  std::vector<std::string> cells(plan.schedule.size());
  std::size_t width = 0;
  for (std::int64_t g = 0; g < std::ssize(plan.groups); ++g) {
    const WaveGroup& group = plan.groups[index(g)];
    for (std::int64_t p = group.first_position; p < group.first_position + group.num_tiles; ++p) {
      std::string& cell = cells[index(plan.schedule[index(p)])];
      cell = std::to_string(plan.wave_of(p)) + group_letters(g);
      width = std::max(width, cell.size());
    }
  }
  fmt::format_to(out, "\ntile map: wave number and group letter\n");
  std::int64_t first_tile = 0;
  std::int64_t rows_left = kMaxMapRows;
  for (std::size_t i = 0; i < plan.grid.problems().size(); ++i) {
    const Problem& p = plan.grid.problems()[i];
    const std::int64_t cols = plan::ceil_div(p.cols, plan.grid.tile_n());
    const MapProblem problem{first_tile, cols == 0 ? 0 : plan::ceil_div(p.rows, plan.grid.tile_m()), cols};
    first_tile += problem.rows * problem.cols;
    if (rows_left == 0) {
      fmt::format_to(out, "  ... {} more problems\n", plan.grid.problems().size() - i);
      return;
    }
    if (plan.grid.problems().size() > 1) {
      fmt::format_to(out, "  problem {}: rows [{}, {}), columns [{}, {}), weight {}\n", i, p.row_begin,
                     p.row_begin + p.rows, p.col_begin, p.col_begin + p.cols, p.weight);
    }
    const std::int64_t rows = std::min(problem.rows, rows_left);
    rows_left -= rows;
    print_map_rows(plan, cells, problem, rows, width, out);
  }
}

void print_groups(const OverlapPlan& plan, Out out) {
  fmt::format_to(out, "\n{:>7} {:>10} {:>12} {:>10} {:>14}  transfers\n", "group", "waves", "positions",
                 "tiles", "elements");
  const std::vector<std::int64_t> partition = plan.partition();
  const std::int64_t shown = std::min(std::ssize(plan.groups), kMaxTableRows);
  for (std::int64_t g = 0; g < shown; ++g) {
    const WaveGroup& group = plan.groups[index(g)];
    std::int64_t elements = 0;
    for (std::int64_t p = group.first_position; p < group.first_position + group.num_tiles; ++p) {
      elements += plan.grid.tile(plan.schedule[index(p)]).size();
    }
    std::vector<std::int64_t> transfers;
    for (std::int64_t t = 0; t < std::ssize(plan.transfers); ++t) {
      if (plan.transfers[index(t)].trigger == Trigger{TriggerKind::kGroup, g}) transfers.push_back(t);
    }
    fmt::format_to(out, "{:>7} {:>10} {:>12} {:>10} {:>14}  {}\n", fmt::format("{} {}", g, group_letters(g)),
                   partition[index(g)], group.first_position, group.num_tiles, elements,
                   transfers.empty() ? "-" : fmt::format("{}", fmt::join(transfers, " ")));
  }
  if (shown < std::ssize(plan.groups))
    fmt::format_to(out, "  ... {} more\n", std::ssize(plan.groups) - shown);
}

std::string show(const Region& region) {
  if (region.count == 0) return "-";
  return fmt::format("{}[{}, {})", name_of(region.buffer), region.offset, region.offset + region.count);
}

void print_transfers(const OverlapPlan& plan, Out out) {
  if (plan.transfers.empty()) {
    fmt::format_to(out, "\nno transfers\n");
    return;
  }
  fmt::format_to(out, "\ntransfer  channel  what; from -> to\n");
  const std::int64_t shown = std::min(std::ssize(plan.transfers), kMaxTableRows);
  for (std::int64_t i = 0; i < shown; ++i) {
    const Transfer& t = plan.transfers[index(i)];
    fmt::format_to(out, "{:>8}  {:>7}  {}; {} -> {}\n", i, t.channel, plan::describe(t), show(t.source),
                   show(t.destination));
    constexpr std::size_t kMaxCounts = 16;
    if (!t.send_counts.empty() && t.send_counts.size() <= kMaxCounts) {
      fmt::format_to(out, "{:19}send    {}\n", "", fmt::join(t.send_counts, " "));
    }
    if (!t.receive_counts.empty() && t.receive_counts.size() <= kMaxCounts) {
      fmt::format_to(out, "{:19}receive {}\n", "", fmt::join(t.receive_counts, " "));
    }
    if (t.slice >= 0) fmt::format_to(out, "{:19}brings slice {}\n", "", t.slice);
  }
  if (shown < std::ssize(plan.transfers))
    fmt::format_to(out, "  ... {} more\n", std::ssize(plan.transfers) - shown);
}

/// The main loop, block by block.
void print_input(const OverlapPlan& plan, Out out) {
  fmt::format_to(out, "\ninput: {} x {} here; the main loop, in {} pass{} over the tiles\n", plan.input_rows,
                 plan.input_cols, plan.passes().size(), plan.passes().size() == 1 ? "" : "es");
  const std::int64_t shown = std::min(std::ssize(plan.input_blocks), kMaxTableRows);
  for (std::int64_t b = 0; b < shown; ++b) {
    const InputBlock& block = plan.input_blocks[index(b)];
    fmt::format_to(out, "{:>8}  columns [{}, {}) of A, {}\n", b, block.k_begin, block.k_begin + block.depth,
                   show({block.buffer, block.offset, plan.grid.rows() * block.depth}));
  }
  if (shown < std::ssize(plan.input_blocks))
    fmt::format_to(out, "  ... {} more\n", std::ssize(plan.input_blocks) - shown);
}

void print_rest(const OverlapPlan& plan, Out out) {
  if (!plan.slices.empty()) {
    fmt::format_to(out, "\nslices {}, gates {}\n", plan.slices.size(), plan.gates.size());
  }
  if (!plan.input_blocks.empty()) print_input(plan, out);
  if (plan.restore.bands.empty()) {
    fmt::format_to(out, "\nrestore: none, the output is in its place\n");
  } else {
    fmt::format_to(out, "\nrestore: {} bands of rows in {} pieces, from the {} buffer\n",
                   plan.restore.bands.size(), plan.restore.pieces.size(), name_of(plan.restore.source));
  }
}

}  // namespace

std::string to_text(const OverlapPlan& plan) {
  // The indices of a plan that does not hold may lead nowhere.
  if (const Verdict verdict = verify(plan); !verdict) {
    return fmt::format("{} plan of rank {} of {}\nthis plan does not hold: {}\n", plan.operation, plan.rank,
                       plan.world_size, verdict.reason);
  }
  std::string text;
  Out out(text);
  print_header(plan, out);
  if (plan.grid.num_tiles() > 0) {
    print_map(plan, out);
    print_groups(plan, out);
  }
  print_transfers(plan, out);
  print_rest(plan, out);
  return text;
}

}  // namespace flashoverlap
