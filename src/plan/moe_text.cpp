#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/moe_world.h"

/// Names, and what `flashoverlap plan moe-layer` prints.
namespace flashoverlap {
namespace {

constexpr std::string_view kPaddingNames[] = {"paper", "ragged", "shared"};
constexpr std::string_view kOrderNames[] = {"expert-major", "owner-major"};
constexpr std::string_view kTransportNames[] = {"put", "collective"};

template <typename Enum, std::size_t kCount>
Enum parse(std::string_view what, std::string_view name, const std::string_view (&names)[kCount]) {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  core::fail(ErrorKind::kBadArgument, "{} '{}' is not known; one of {} is expected", what, name,
             fmt::join(names, ", "));
}

// A page of each table; a plan for people, not for machines: those read the JSON.
constexpr std::size_t kMaxLines = 40;

template <typename Range, typename Line>
void list(std::string& text, const Range& range, const Line& line) {
  std::size_t count = 0;
  for (const auto& item : range) {
    if (count++ < kMaxLines) text += line(item) + "\n";
  }
  if (count > kMaxLines) text += fmt::format("  … {} in all\n", count);
}

std::string layout_text(const MoeLayout& layout) {
  std::string text =
      fmt::format("layout: {} expert rows ({} valid), {} send rows, {} of them for own experts\n",
                  layout.rows, layout.valid_rows, layout.send_rows, layout.own_rows);
  text += "  expert  owner    row begin         rows       padded    owner's row\n";
  list(text, layout.groups, [](const MoeGroup& g) {
    return fmt::format("  {:6}  {:5}  {:11}  {:11}  {:11}    {:11}", g.expert, g.owner, g.row_begin, g.rows,
                       g.padded_rows, g.owner_row);
  });
  return text;
}

std::string bands_text(const std::vector<plan::PlacedBand>& bands) {
  std::string text = fmt::format("combine plan: {} row bands in the order of the schedule\n", bands.size());
  text += "  band  expert    row begin  -> rank: destination row, valid rows\n";
  std::size_t number = 0;
  list(text, bands, [&](const plan::PlacedBand& placed) {
    std::string line =
        fmt::format("  {:4}  {:6}  {:11} ", number++, placed.band.expert, placed.band.row_begin);
    for (const MoeBandPart& part : placed.band.parts) {
      line += fmt::format(" -> {}: {}, {}", part.destination, part.destination_row, part.rows);
    }
    return line;
  });
  return text;
}

std::string segments_text(const std::vector<MoeSegment>& segments,
                          const std::vector<std::vector<plan::MoeRun>>& runs) {
  std::string text = fmt::format("segments: {}\n  segment  first band  bands  puts\n", segments.size());
  std::size_t number = 0;
  list(text, segments, [&](const MoeSegment& segment) {
    std::string line = fmt::format("  {:7}  {:10}  {:5}  {:4}", number, segment.first_band, segment.num_bands,
                                   runs[number].size());
    ++number;
    return line;
  });
  return text;
}

}  // namespace

std::string_view name_of(MoePadding padding) {
  return kPaddingNames[static_cast<std::size_t>(padding)];
}
std::string_view name_of(MoeOrder order) {
  return kOrderNames[static_cast<std::size_t>(order)];
}
std::string_view name_of(MoeTransport transport) {
  return kTransportNames[static_cast<std::size_t>(transport)];
}
MoePadding parse_moe_padding(std::string_view name) {
  return parse<MoePadding>("padding", name, kPaddingNames);
}
MoeOrder parse_moe_order(std::string_view name) {
  return parse<MoeOrder>("order", name, kOrderNames);
}
MoeTransport parse_moe_transport(std::string_view name) {
  return parse<MoeTransport>("transport", name, kTransportNames);
}

std::string moe_plan_text(const MoePlanOptions& options, const MoeCounts& counts) {
  plan::MoeWorld world(options, counts);
  const std::int32_t rank = options.rank;
  const MoeWaste waste = moe_waste(options, counts);
  std::string text =
      fmt::format("moe-layer, rank {} of {}, experts {} to {} of {}, tile {} x {}, {}, {}, {}\n", rank,
                  options.world_size, world.first_expert(rank), world.first_expert(rank + 1) - 1,
                  options.num_experts, options.tile_m, options.tile_n, name_of(options.padding),
                  name_of(options.order), name_of(options.transport));
  text += layout_text(world.layout(rank));
  text += bands_text(world.bands(rank));
  if (options.transport == MoeTransport::kPut) text += segments_text(world.segments(rank), world.runs(rank));
  text += fmt::format("wasted rows: {} of {} computed ({} bands, {} experts with rows)\n",
                      waste.wasted_rows(), waste.computed_rows, waste.bands, waste.experts);
  return text;
}

}  // namespace flashoverlap
