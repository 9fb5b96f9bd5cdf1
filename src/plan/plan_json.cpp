#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/plan.h"
#include "plan/arithmetic.h"
#include "plan/json_reader.h"

/// Plans as JSON. One pair of functions for each type, in the order of plan.h; docs/plan-format.md has the
/// schema.
namespace flashoverlap {
namespace {

using core::fail;
using plan::JsonReader;
using Json = nlohmann::ordered_json;

/// Raise when the meaning of a field changes, or a required one is added.
constexpr std::int64_t kFormat = 2;

constexpr std::array kBuffers = {BufferKind::kInput, BufferKind::kWeight, BufferKind::kPacked,
                                 BufferKind::kReceived, BufferKind::kOutput};
constexpr std::array kTransfers = {
    TransferKind::kAllReduce, TransferKind::kReduceScatter, TransferKind::kAllGather, TransferKind::kAllToAll,
    TransferKind::kSend,      TransferKind::kReceive,       TransferKind::kPut};
constexpr std::array<std::pair<GatePoint, const char*>, 2> kPoints = {
    {{GatePoint::kStart, "start"}, {GatePoint::kFinish, "finish"}}};
constexpr std::array<std::pair<TriggerKind, const char*>, 3> kTriggers = {
    {{TriggerKind::kStart, "start"}, {TriggerKind::kGroup, "group"}, {TriggerKind::kSlice, "slice"}}};

template <typename Enum, std::size_t N>
Enum named(const JsonReader& reader, const std::array<Enum, N>& values) {
  const std::string name = reader.text();
  std::string accepted;
  for (const Enum value : values) {
    if (name_of(value) == name) return value;
    accepted += (accepted.empty() ? "" : ", ") + std::string(name_of(value));
  }
  reader.bad_value("\"" + name + "\"", accepted);
}

template <typename Enum, std::size_t N>
Enum named(const JsonReader& reader, const std::array<std::pair<Enum, const char*>, N>& values) {
  const std::string name = reader.text();
  std::string accepted;
  for (const auto& [value, value_name] : values) {
    if (name == value_name) return value;
    accepted += (accepted.empty() ? "" : ", ") + std::string(value_name);
  }
  reader.bad_value("\"" + name + "\"", accepted);
}

template <typename Enum, std::size_t N>
const char* name_in(const std::array<std::pair<Enum, const char*>, N>& values, Enum value) {
  for (const auto& [candidate, name] : values) {
    if (candidate == value) return name;
  }
  return "?";
}

Json write(const Problem& p) {
  return {{"row_begin", p.row_begin},
          {"rows", p.rows},
          {"col_begin", p.col_begin},
          {"cols", p.cols},
          {"weight", p.weight}};
}

Problem read_problem(const JsonReader& r) {
  return {r.integer("row_begin"), r.integer("rows"), r.integer("col_begin"), r.integer("cols"),
          r.integer("weight")};
}

Json write(const TileGrid& grid) {
  Json problems = Json::array();
  for (const Problem& p : grid.problems()) problems.push_back(write(p));
  return {{"problems", problems}, {"k", grid.k()}, {"tile_m", grid.tile_m()}, {"tile_n", grid.tile_n()}};
}

/// Tiles of a grid, or nothing when its sizes do not hold.
std::optional<std::int64_t> count_tiles(const std::vector<Problem>& problems, std::int64_t tile_m,
                                        std::int64_t tile_n) {
  if (tile_m < 1 || tile_n < 1) return std::nullopt;
  std::optional<std::int64_t> total = 0;
  for (const Problem& p : problems) {
    if (p.rows < 0 || p.cols < 0) return std::nullopt;
    const auto count = plan::product(plan::ceil_div(p.rows, tile_m), plan::ceil_div(p.cols, tile_n));
    total = count ? plan::sum(*total, *count) : std::nullopt;
    if (!total) return std::nullopt;
  }
  return total;
}

TileGrid read_grid(const JsonReader& r, std::size_t scheduled) {
  std::vector<Problem> problems;
  r.field("problems").each([&](const JsonReader& p) { problems.push_back(read_problem(p)); });
  // Before memory is spent on tiles: a damaged size may ask for very many.
  const auto tiles = count_tiles(problems, r.integer("tile_m"), r.integer("tile_n"));
  if (tiles && std::cmp_not_equal(*tiles, scheduled)) {
    r.bad("its sizes make {} tiles, but plan.schedule has {}", *tiles, scheduled);
  }
  try {
    return TileGrid(std::move(problems), r.integer("k"), r.integer("tile_m"), r.integer("tile_n"));
  } catch (const Error& error) {
    r.bad("{}", error.what());
  }
}

Json write(const Region& region) {
  return {{"buffer", name_of(region.buffer)}, {"offset", region.offset}, {"count", region.count}};
}

Region read_region(const JsonReader& r) {
  return {named(r.field("buffer"), kBuffers), r.integer("offset"), r.integer("count")};
}

Json write(const Slice& slice) {
  return {{"source", slice.source}, {"region", write(slice.region)}};
}

Slice read_slice(const JsonReader& r) {
  return {r.integer32("source"), read_region(r.field("region"))};
}

Json write(const Gate& gate) {
  return {{"tile", gate.tile},
          {"slice", gate.slice},
          {"point", name_in(kPoints, gate.point)},
          {"k_begin", gate.k_begin},
          {"offset", gate.offset}};
}

Gate read_gate(const JsonReader& r) {
  return {r.integer("tile"), r.integer("slice"), named(r.field("point"), kPoints), r.integer("k_begin"),
          r.integer("offset")};
}

/// Tables that grow with the plan are arrays of numbers, in the order of the struct's members.
Json write(const Placement& placement) {
  Json segments = Json::array();
  for (const PlacementSegment& s : placement.segments)
    segments.push_back(Json::array({s.row_begin, s.rows, s.offset}));
  return {{"first_segment", placement.first_segment}, {"segments", segments}};
}

Placement read_placement(const JsonReader& r) {
  Placement placement;
  placement.first_segment = r.field("first_segment").integers();
  r.field("segments").each([&](const JsonReader& row) {
    const auto [row_begin, rows, offset] = row.tuple<3>();
    placement.segments.push_back({row_begin, rows, offset});
  });
  return placement;
}

Json write(const WaveGroup& group) {
  return {{"first_position", group.first_position}, {"num_tiles", group.num_tiles}};
}

WaveGroup read_group(const JsonReader& r) {
  return {r.integer("first_position"), r.integer("num_tiles")};
}

Json write(const Transfer& t) {
  return {{"kind", name_of(t.kind)},
          {"trigger", {{"kind", name_in(kTriggers, t.trigger.kind)}, {"index", t.trigger.index}}},
          {"channel", t.channel},
          {"peer", t.peer},
          {"source", write(t.source)},
          {"destination", write(t.destination)},
          {"send_counts", t.send_counts},
          {"receive_counts", t.receive_counts},
          {"slice", t.slice}};
}

Transfer read_transfer(const JsonReader& r) {
  Transfer t;
  t.kind = named(r.field("kind"), kTransfers);
  const JsonReader trigger = r.field("trigger");
  t.trigger = {named(trigger.field("kind"), kTriggers), trigger.integer("index")};
  t.channel = r.integer32("channel");
  t.peer = r.integer32("peer");
  t.source = read_region(r.field("source"));
  t.destination = read_region(r.field("destination"));
  t.send_counts = r.field("send_counts").integers();
  t.receive_counts = r.field("receive_counts").integers();
  t.slice = r.integer("slice");
  return t;
}

Json write(const Restore& restore) {
  Json bands = Json::array();
  for (const RestoreBand& b : restore.bands) {
    bands.push_back(Json::array({b.row_begin, b.rows, b.first_piece, b.num_pieces}));
  }
  Json pieces = Json::array();
  for (const RestorePiece& p : restore.pieces) pieces.push_back(Json::array({p.col_begin, p.cols, p.offset}));
  return {{"source", name_of(restore.source)}, {"bands", bands}, {"pieces", pieces}};
}

Restore read_restore(const JsonReader& r) {
  Restore restore;
  restore.source = named(r.field("source"), kBuffers);
  r.field("bands").each([&](const JsonReader& row) {
    const auto [row_begin, rows, first_piece, num_pieces] = row.tuple<4>();
    restore.bands.push_back({row_begin, rows, first_piece, num_pieces});
  });
  r.field("pieces").each([&](const JsonReader& row) {
    const auto [col_begin, cols, offset] = row.tuple<3>();
    restore.pieces.push_back({col_begin, cols, offset});
  });
  return restore;
}

Json write(const InputBlock& b) {
  return {{"k_begin", b.k_begin}, {"depth", b.depth}, {"buffer", name_of(b.buffer)}, {"offset", b.offset}};
}

InputBlock read_input_block(const JsonReader& r) {
  return {r.integer("k_begin"), r.integer("depth"), named(r.field("buffer"), kBuffers), r.integer("offset")};
}

Resources read_resources(const JsonReader& r) {
  return {r.integer("compute_units"), r.integer("communication_units")};
}

template <typename T>
Json write_all(const std::vector<T>& values) {
  Json array = Json::array();
  for (const T& value : values) array.push_back(write(value));
  return array;
}

DType read_dtype(const JsonReader& r) {
  try {
    return parse_dtype(r.text());
  } catch (const Error& error) {
    r.bad("{}", error.what());
  }
}

OverlapPlan read_plan(const JsonReader& r) {
  if (const std::int64_t format = r.integer("format"); format != kFormat) {
    r.field("format").bad_value(std::to_string(format), std::to_string(kFormat));
  }
  OverlapPlan plan;
  plan.operation = r.field("operation").text();
  plan.rank = r.integer32("rank");
  plan.world_size = r.integer32("world_size");
  plan.dtype = read_dtype(r.field("dtype"));
  plan.schedule = r.field("schedule").integers();
  plan.grid = read_grid(r.field("grid"), plan.schedule.size());
  r.field("gates").each([&](const JsonReader& v) { plan.gates.push_back(read_gate(v)); });
  plan.placement = read_placement(r.field("placement"));
  r.field("groups").each([&](const JsonReader& v) { plan.groups.push_back(read_group(v)); });
  r.field("slices").each([&](const JsonReader& v) { plan.slices.push_back(read_slice(v)); });
  r.field("transfers").each([&](const JsonReader& v) { plan.transfers.push_back(read_transfer(v)); });
  plan.restore = read_restore(r.field("restore"));
  plan.resources = read_resources(r.field("resources"));
  plan.packed_size = r.integer("packed_size");
  plan.received_size = r.integer("received_size");
  plan.output_rows = r.integer("output_rows");
  plan.output_cols = r.integer("output_cols");
  plan.output_row_shift = r.integer("output_row_shift");
  plan.output_col_shift = r.integer("output_col_shift");
  if (r.has("input_blocks")) {
    r.field("input_blocks").each([&](const JsonReader& v) {
      plan.input_blocks.push_back(read_input_block(v));
    });
    plan.input_rows = r.integer("input_rows");
    plan.input_cols = r.integer("input_cols");
  }
  if (r.has("messages_per_pair")) plan.messages_per_pair = r.integer("messages_per_pair");
  plan.agreement = r.field("agreement").hex();
  return plan;
}

}  // namespace

std::string to_json(const OverlapPlan& plan) {
  Json json = {{"format", kFormat},
               {"operation", plan.operation},
               {"rank", plan.rank},
               {"world_size", plan.world_size},
               {"dtype", name_of(plan.dtype)},
               {"grid", write(plan.grid)},
               {"schedule", plan.schedule},
               {"gates", write_all(plan.gates)},
               {"placement", write(plan.placement)},
               {"groups", write_all(plan.groups)},
               {"slices", write_all(plan.slices)},
               {"transfers", write_all(plan.transfers)},
               {"restore", write(plan.restore)},
               {"resources",
                {{"compute_units", plan.resources.compute_units},
                 {"communication_units", plan.resources.communication_units}}},
               {"packed_size", plan.packed_size},
               {"received_size", plan.received_size},
               {"output_rows", plan.output_rows},
               {"output_cols", plan.output_cols},
               {"output_row_shift", plan.output_row_shift},
               {"output_col_shift", plan.output_col_shift},
               // As text: readers that keep numbers as doubles would round it.
               {"agreement", fmt::format("{:016x}", plan.agreement)}};
  if (!plan.input_blocks.empty()) {
    json["input_blocks"] = write_all(plan.input_blocks);
    json["input_rows"] = plan.input_rows;
    json["input_cols"] = plan.input_cols;
  }
  if (plan.messages_per_pair != 0) json["messages_per_pair"] = plan.messages_per_pair;
  // Bytes that are not UTF-8 can only be in the operation's name.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

OverlapPlan plan_from_json(std::string_view json) {
  nlohmann::json document;
  try {
    document = nlohmann::json::parse(json);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kBadArgument, "plan: not JSON: {}", error.what());
  }
  OverlapPlan plan = read_plan(JsonReader("plan", document));
  if (const Verdict verdict = verify(plan); !verdict) {
    fail(ErrorKind::kBadArgument, "plan: fields are in conflict: {}", verdict.reason);
  }
  return plan;
}

}  // namespace flashoverlap
