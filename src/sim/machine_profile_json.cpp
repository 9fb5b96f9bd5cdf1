#include <fmt/core.h>

#include <array>
#include <fstream>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/machine_profile.h"
#include "sim/json_fields.h"
#include "sim/shipped_profiles.h"

namespace flashoverlap {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;
using sim::JsonFields;

constexpr std::string_view kSchema = "flashoverlap.machine-profile/1";
constexpr double kMaxUs = 1e12;
constexpr double kMaxGbps = 1e9;
constexpr double kMaxGflops = 1e9;
constexpr double kMaxBytes = 9007199254740992.0;
constexpr std::int64_t kMaxUnits = 1 << 20;
constexpr std::int64_t kMaxRanks = 1 << 24;
constexpr std::int64_t kMaxSize = std::int64_t{1} << 40;

constexpr std::array kKinds = {
    TransferKind::kAllReduce, TransferKind::kReceive,  TransferKind::kReduceScatter,
    TransferKind::kAllGather, TransferKind::kAllToAll, TransferKind::kSend,
    TransferKind::kPut};

TransferKind read_kind(const JsonFields& fields, const char* field) {
  const std::string text = fields.text(field);
  std::string names;
  for (const TransferKind kind : kKinds) {
    if (text == name_of(kind)) return kind;
    names += (names.empty() ? "" : ", ") + std::string(name_of(kind));
  }
  fields.refuse(field, "must be one of " + names);
}

DType read_dtype(const JsonFields& fields, const char* field) {
  try {
    return parse_dtype(fields.text(field));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kBadArgument) throw;
    fields.refuse(field, "must be one of f32, bf16, f16");
  }
}

Provenance read_provenance(const Json& value, const std::string& origin) {
  const JsonFields fields(value, "provenance", origin,
                          {"kind", "date", "device", "driver", "libraries", "sources"});
  Provenance provenance;
  provenance.kind = fields.text("kind");
  if (provenance.kind != "measured" && provenance.kind != "published" && provenance.kind != "estimated") {
    fields.refuse("kind", "must be one of measured, published, estimated");
  }
  provenance.date = fields.text("date");
  provenance.device = fields.text("device");
  provenance.driver = fields.text_or("driver", "");
  if (fields.has("libraries")) {
    const Json& libraries = fields.any("libraries");
    if (!libraries.is_object()) fields.refuse("libraries", "must be an object of name and version");
    for (const auto& item : libraries.items()) {
      if (!item.value().is_string()) fields.refuse("libraries", "must have strings as versions");
      provenance.libraries[item.key()] = item.value().get<std::string>();
    }
  }
  fields.for_each("sources", [&](const Json& source, const std::string&) {
    if (!source.is_string()) fields.refuse("sources", "must be an array of strings");
    provenance.sources.push_back(source.get<std::string>());
  });
  return provenance;
}

GemmKernel read_kernel(const Json& value, const std::string& path, const std::string& origin) {
  const JsonFields fields(
      value, path, origin,
      {"dtype", "tile_m", "tile_n", "units_per_tile", "overhead_us", "unit_gflops", "ragged", "source"});
  GemmKernel kernel;
  kernel.dtype = read_dtype(fields, "dtype");
  kernel.tile_m = fields.integer("tile_m", 1, kMaxSize);
  kernel.tile_n = fields.integer("tile_n", 1, kMaxSize);
  kernel.units_per_tile = fields.integer_or("units_per_tile", 1, kMaxUnits, 1);
  kernel.overhead_us = fields.number("overhead_us", 0, kMaxUs);
  kernel.unit_gflops = fields.number("unit_gflops", 1e-6, kMaxGflops);
  const std::string ragged = fields.text("ragged");
  if (ragged != "padded" && ragged != "proportional")
    fields.refuse("ragged", "must be padded or proportional");
  kernel.ragged = ragged == "padded" ? RaggedTiles::kPadded : RaggedTiles::kProportional;
  kernel.source = fields.text("source");
  return kernel;
}

GemmSample read_sample(const Json& value, const std::string& path, const std::string& origin) {
  const JsonFields fields(value, path, origin,
                          {"m", "n", "k", "dtype", "tile_m", "tile_n", "units", "duration_us", "spread_us"});
  GemmSample sample;
  sample.m = fields.integer("m", 1, kMaxSize);
  sample.n = fields.integer("n", 1, kMaxSize);
  sample.k = fields.integer("k", 1, kMaxSize);
  sample.dtype = read_dtype(fields, "dtype");
  sample.tile_m = fields.integer("tile_m", 1, kMaxSize);
  sample.tile_n = fields.integer("tile_n", 1, kMaxSize);
  sample.units = fields.integer("units", 1, kMaxUnits);
  sample.duration_us = fields.number("duration_us", 1e-6, kMaxUs);
  sample.spread_us = fields.number_or("spread_us", 0, kMaxUs, 0);
  return sample;
}

GemmProfile read_gemm(const Json& value, const std::string& origin) {
  const JsonFields fields(value, "gemm", origin, {"launch_us", "kernels", "samples"});
  GemmProfile gemm;
  gemm.launch_us = fields.number("launch_us", 0, kMaxUs);
  std::set<std::tuple<DType, std::int64_t, std::int64_t>> seen;
  fields.for_each("kernels", [&](const Json& kernel, const std::string& path) {
    gemm.kernels.push_back(read_kernel(kernel, path, origin));
    const GemmKernel& last = gemm.kernels.back();
    if (!seen.emplace(last.dtype, last.tile_m, last.tile_n).second) {
      core::fail(ErrorKind::kFile,
                 "{}: field '{}' describes {} {}x{} a second time, one kernel per dtype and tile", origin,
                 path, name_of(last.dtype), last.tile_m, last.tile_n);
    }
  });
  if (gemm.kernels.empty()) core::fail(ErrorKind::kFile, "{}: field 'gemm.kernels' has no kernel", origin);
  fields.for_each("samples", [&](const Json& sample, const std::string& path) {
    gemm.samples.push_back(read_sample(sample, path, origin));
  });
  return gemm;
}

CurvePoint read_point(const Json& value, const std::string& path, const std::string& origin) {
  const JsonFields fields(value, path, origin, {"bytes", "time_us", "gbps", "spread_us"});
  CurvePoint point;
  point.bytes = fields.number("bytes", 1, kMaxBytes);
  if (fields.has("time_us") == fields.has("gbps")) {
    core::fail(ErrorKind::kFile, "{}: field '{}' must have either time_us or gbps", origin, path);
  }
  constexpr double kSmallest = 1e-9;
  point.time_us = fields.has("time_us") ? fields.number("time_us", kSmallest, kMaxUs)
                                        : point.bytes / (fields.number("gbps", kSmallest, kMaxGbps) * 1e3);
  point.spread_us = fields.number_or("spread_us", 0, kMaxUs, 0);
  return point;
}

CommunicationCurve read_curve(const Json& value, const std::string& path, const std::string& origin) {
  const JsonFields fields(value, path, origin,
                          {"collective", "world_size", "units", "dtype", "points", "source"});
  const TransferKind collective = read_kind(fields, "collective");
  const std::int64_t world_size = fields.integer("world_size", 2, kMaxRanks);
  std::vector<CurvePoint> points;
  fields.for_each("points", [&](const Json& point, const std::string& point_path) {
    points.push_back(read_point(point, point_path, origin));
  });
  if (points.empty()) {
    core::fail(ErrorKind::kFile, "{}: field '{}' has no point, at least one is needed", origin,
               fields.path_of("points"));
  }
  CommunicationCurve curve{
      .collective = collective,
      .world_size = world_size,
      .units = fields.integer("units", 0, kMaxUnits),
      .dtype = {},
      .curve =
          BandwidthCurve(std::move(points), fmt::format("{} of {} ranks", name_of(collective), world_size)),
      .source = fields.text("source")};
  if (fields.has("dtype")) curve.dtype = read_dtype(fields, "dtype");
  return curve;
}

TopologyLevel read_level(const Json& value, const std::string& path, const std::string& origin) {
  const JsonFields fields(
      value, path, origin,
      {"name", "ranks", "ports", "latency_us", "latency_grows", "bandwidth_gbps", "source"});
  TopologyLevel level;
  level.name = fields.text("name");
  level.ranks = fields.integer("ranks", 0, kMaxRanks);
  level.ports = fields.integer_or("ports", 0, kMaxRanks, 0);
  level.latency_us = fields.number("latency_us", 0, kMaxUs);
  level.latency_grows = fields.boolean_or("latency_grows", false);
  level.bandwidth_gbps = fields.number("bandwidth_gbps", 1e-9, kMaxGbps);
  level.source = fields.text("source");
  return level;
}

void read_levels(const JsonFields& fields, MachineProfile& profile, const std::string& origin) {
  fields.for_each("levels", [&](const Json& level, const std::string& path) {
    if (!profile.levels.empty()) {
      const std::int64_t inner = profile.levels.back().ranks;
      if (inner == 0) {
        core::fail(ErrorKind::kFile, "{}: field '{}' follows a level of any size, which must be the last",
                   origin, path);
      }
      const TopologyLevel read = read_level(level, path, origin);
      if (read.ranks != 0 && (read.ranks <= inner || read.ranks % inner != 0)) {
        core::fail(ErrorKind::kFile,
                   "{}: field '{}.ranks' is {}, must be a larger multiple of the inner level's {}", origin,
                   path, read.ranks, inner);
      }
    }
    profile.levels.push_back(read_level(level, path, origin));
  });
}

MachineProfile read_profile(const Json& json, const std::string& origin) {
  // The schema first: a file of another version should be told so rather than that it has unknown fields.
  if (json.is_object() && json.contains("schema") && json["schema"] != kSchema) {
    core::fail(ErrorKind::kFile, "{}: field 'schema' is {}, this version reads \"{}\"", origin,
               json["schema"].dump(-1, ' ', true, Json::error_handler_t::replace), kSchema);
  }
  const JsonFields fields(json, "", origin,
                          {"schema", "name", "description", "provenance", "units", "gemm", "signal_us",
                           "restore_us_per_mib", "slowdown", "steal_us_per_mib", "curves", "levels"});
  static_cast<void>(fields.any("schema"));
  MachineProfile profile;
  profile.name = fields.text("name");
  profile.description = fields.text_or("description", "");
  profile.provenance = read_provenance(fields.any("provenance"), origin);
  profile.units = fields.integer("units", 1, kMaxUnits);
  profile.gemm = read_gemm(fields.any("gemm"), origin);
  profile.signal_us = fields.number("signal_us", 0, kMaxUs);
  profile.restore_us_per_mib = fields.number_or("restore_us_per_mib", 0, kMaxUs, 0);
  profile.slowdown = fields.number_or("slowdown", 1, 1e3, 1);
  profile.steal_us_per_mib = fields.number_or("steal_us_per_mib", 0, kMaxUs, 0);
  fields.for_each("curves", [&](const Json& curve, const std::string& path) {
    profile.curves.push_back(read_curve(curve, path, origin));
    if (profile.curves.back().units >= profile.units) {
      core::fail(ErrorKind::kFile, "{}: field '{}.units' is {}, must leave some of the {} units to compute",
                 origin, path, profile.curves.back().units, profile.units);
    }
  });
  read_levels(fields, profile, origin);
  return profile;
}

OrderedJson provenance_json(const Provenance& provenance) {
  OrderedJson json;
  json["kind"] = provenance.kind;
  json["date"] = provenance.date;
  json["device"] = provenance.device;
  json["driver"] = provenance.driver;
  json["libraries"] = provenance.libraries;
  json["sources"] = provenance.sources;
  return json;
}

OrderedJson gemm_json(const GemmProfile& gemm) {
  OrderedJson json;
  json["launch_us"] = sim::number(gemm.launch_us);
  json["kernels"] = OrderedJson::array();
  for (const GemmKernel& kernel : gemm.kernels) {
    json["kernels"].push_back({{"dtype", name_of(kernel.dtype)},
                               {"tile_m", kernel.tile_m},
                               {"tile_n", kernel.tile_n},
                               {"units_per_tile", kernel.units_per_tile},
                               {"overhead_us", sim::number(kernel.overhead_us)},
                               {"unit_gflops", sim::number(kernel.unit_gflops)},
                               {"ragged", kernel.ragged == RaggedTiles::kPadded ? "padded" : "proportional"},
                               {"source", kernel.source}});
  }
  json["samples"] = OrderedJson::array();
  for (const GemmSample& s : gemm.samples) {
    json["samples"].push_back({{"m", s.m},
                               {"n", s.n},
                               {"k", s.k},
                               {"dtype", name_of(s.dtype)},
                               {"tile_m", s.tile_m},
                               {"tile_n", s.tile_n},
                               {"units", s.units},
                               {"duration_us", sim::number(s.duration_us)},
                               {"spread_us", sim::number(s.spread_us)}});
  }
  return json;
}

OrderedJson curve_json(const CommunicationCurve& curve) {
  OrderedJson json = {
      {"collective", name_of(curve.collective)}, {"world_size", curve.world_size}, {"units", curve.units}};
  if (curve.dtype) json["dtype"] = name_of(*curve.dtype);
  json["points"] = OrderedJson::array();
  for (const CurvePoint& point : curve.curve.points()) {
    json["points"].push_back({{"bytes", sim::number(point.bytes)},
                              {"time_us", sim::number(point.time_us)},
                              {"spread_us", sim::number(point.spread_us)}});
  }
  json["source"] = curve.source;
  return json;
}

OrderedJson level_json(const TopologyLevel& level) {
  return {{"name", level.name},
          {"ranks", level.ranks},
          {"ports", level.ports},
          {"latency_us", sim::number(level.latency_us)},
          {"latency_grows", level.latency_grows},
          {"bandwidth_gbps", sim::number(level.bandwidth_gbps)},
          {"source", level.source}};
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file.is_open() || file.bad())
    core::fail(ErrorKind::kFile, "machine profile '{}' cannot be read", path);
  return text;
}

}  // namespace

MachineProfile parse_machine_profile(std::string_view json, const std::string& origin) {
  const Json parsed = sim::parse_json_file(json, origin);
  try {
    return read_profile(parsed, origin);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kFile) throw;
    core::fail(ErrorKind::kFile, "{}: {}", origin, error.what());
  }
}

std::string to_json(const MachineProfile& profile) {
  OrderedJson json;
  json["schema"] = kSchema;
  json["name"] = profile.name;
  json["description"] = profile.description;
  json["provenance"] = provenance_json(profile.provenance);
  json["units"] = profile.units;
  json["gemm"] = gemm_json(profile.gemm);
  json["signal_us"] = sim::number(profile.signal_us);
  json["restore_us_per_mib"] = sim::number(profile.restore_us_per_mib);
  json["slowdown"] = sim::number(profile.slowdown);
  json["steal_us_per_mib"] = sim::number(profile.steal_us_per_mib);
  json["curves"] = OrderedJson::array();
  for (const CommunicationCurve& curve : profile.curves) json["curves"].push_back(curve_json(curve));
  json["levels"] = OrderedJson::array();
  for (const TopologyLevel& level : profile.levels) json["levels"].push_back(level_json(level));
  return json.dump(1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

std::vector<std::string> shipped_machine_profiles() {
  std::vector<std::string> names;
  for (const sim::ShippedProfile& profile : sim::shipped_profiles()) names.emplace_back(profile.name);
  return names;
}

MachineProfile load_machine_profile(const std::string& name_or_path) {
  if (name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json")) {
    return parse_machine_profile(read_file(name_or_path), name_or_path);
  }
  std::string names;
  for (const sim::ShippedProfile& profile : sim::shipped_profiles()) {
    if (profile.name == name_or_path) {
      return parse_machine_profile(profile.json, fmt::format("shipped profile {}", profile.name));
    }
    names += (names.empty() ? "" : ", ") + std::string(profile.name);
  }
  core::fail(ErrorKind::kBadArgument,
             "machine '{}' is not known; shipped profiles: {}; a file is given as a path that has '/' "
             "or ends in .json",
             name_or_path, names);
}

}  // namespace flashoverlap
