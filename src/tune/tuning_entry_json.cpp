#include "tune/tuning_entry_json.h"

#include <fmt/format.h>

#include <cmath>

#include "core/fail.h"
#include "flashoverlap/version.h"
#include "sim/json_fields.h"

namespace flashoverlap::tune {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;
using sim::JsonFields;

constexpr std::int64_t kMaxSize = std::int64_t{1} << 40;
constexpr double kMaxUs = 1e12;

/// FNV-1a of the entry without its checksum, keys sorted: any edit by hand changes it.
std::string checksum(Json entry) {
  entry.erase("checksum");
  const std::string text = entry.dump(-1, ' ', true, Json::error_handler_t::replace);
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
  return fmt::format("{:016x}", hash);
}

OrderedJson key_json(const TuningKey& key) {
  return {{"operation", key.operation},
          {"m", key.m},
          {"n", key.n},
          {"k", key.k},
          {"dtype", name_of(key.dtype)},
          {"world_size", key.world_size},
          {"units", key.units},
          {"epilogue", key.epilogue},
          {"variant", key.variant},
          {"communicator", key.communicator}};
}

TuningKey read_key(const Json& value, const std::string& path, const std::string& origin) {
  const JsonFields fields(
      value, path, origin,
      {"operation", "m", "n", "k", "dtype", "world_size", "units", "epilogue", "variant", "communicator"});
  TuningKey key;
  key.operation = fields.text("operation");
  key.m = fields.integer("m", 0, kMaxSize);
  key.n = fields.integer("n", 0, kMaxSize);
  key.k = fields.integer("k", 0, kMaxSize);
  const std::string dtype = fields.text("dtype");
  if (dtype != "f32" && dtype != "bf16" && dtype != "f16")
    fields.refuse("dtype", "must be one of f32, bf16, f16");
  key.dtype = parse_dtype(dtype);
  key.world_size = fields.integer("world_size", 1, kMaxSize);
  key.units = fields.integer("units", 1, kMaxSize);
  key.epilogue = fields.text("epilogue");
  key.variant = fields.text("variant");
  key.communicator = fields.text("communicator");
  return key;
}

std::vector<std::int64_t> read_partition(const JsonFields& fields) {
  std::vector<std::int64_t> partition;
  for (const Json& group : fields.array("partition")) {
    if (!group.is_number_integer() || group < 1 || group > kMaxSize) {
      fields.refuse("partition", "must consist of positive integers");
    }
    partition.push_back(group.get<std::int64_t>());
  }
  return partition;
}

}  // namespace

OrderedJson entry_json(const TuningEntry& entry, const MachineIdentity& identity) {
  OrderedJson json;
  json["key"] = key_json(entry.key);
  json["tile_m"] = entry.tile_m;
  json["tile_n"] = entry.tile_n;
  json["swizzle"] = entry.swizzle;
  json["compute_units"] = entry.resources.compute_units;
  json["communication_units"] = entry.resources.communication_units;
  json["partition"] = entry.partition;
  json["predicted_us"] = sim::number(entry.predicted_us);
  json["serial_us"] = sim::number(entry.serial_us);
  json["measured_us"] = sim::number(entry.measured_us);
  json["how"] = entry.how;
  json["date"] = entry.date;
  json["device"] = identity.device;
  json["driver"] = identity.driver;
  json["libraries"] = identity.libraries;
  json["version"] = kVersion;
  json["checksum"] = checksum(Json::parse(json.dump(-1, ' ', true, Json::error_handler_t::replace)));
  return json;
}

TuningEntry read_entry(const Json& value, const std::string& path, const std::string& origin) {
  const JsonFields fields(value, path, origin,
                          {"key", "tile_m", "tile_n", "swizzle", "compute_units", "communication_units",
                           "partition", "predicted_us", "serial_us", "measured_us", "how", "date", "device",
                           "driver", "libraries", "version", "checksum"});
  const std::string stored = fields.text("checksum");
  if (stored != checksum(value)) {
    fields.refuse("checksum", fmt::format("but the entry has {}: it was damaged or edited", checksum(value)));
  }
  TuningEntry entry;
  entry.key = read_key(fields.any("key"), fields.path_of("key"), origin);
  entry.tile_m = fields.integer("tile_m", 1, kMaxSize);
  entry.tile_n = fields.integer("tile_n", 1, kMaxSize);
  entry.swizzle = fields.integer("swizzle", 1, kMaxSize);
  entry.resources.compute_units = fields.integer("compute_units", 1, kMaxSize);
  entry.resources.communication_units = fields.integer("communication_units", 0, kMaxSize);
  entry.partition = read_partition(fields);
  entry.predicted_us = fields.number("predicted_us", 0, kMaxUs);
  entry.serial_us = fields.number("serial_us", 0, kMaxUs);
  entry.measured_us = fields.number("measured_us", 0, kMaxUs);
  entry.how = fields.text("how");
  if (entry.how != "predicted" && entry.how != "measured")
    fields.refuse("how", "must be predicted or measured");
  entry.date = fields.text("date");
  static_cast<void>(fields.text("device"));
  static_cast<void>(fields.text("driver"));
  static_cast<void>(fields.text("version"));
  if (!fields.any("libraries").is_object())
    fields.refuse("libraries", "must be an object of name and version");
  return entry;
}

std::string mismatch(const Json& value, const MachineIdentity& identity) {
  const auto differs = [](const char* what, const std::string& there, const std::string& here) {
    return fmt::format("it was tuned on {} '{}', this is '{}'", what, there, here);
  };
  if (value["device"] != identity.device) return differs("device", value["device"], identity.device);
  if (value["driver"] != identity.driver) return differs("driver", value["driver"], identity.driver);
  if (value["version"] != kVersion)
    return differs("flashoverlap version", value["version"], std::string(kVersion));
  if (value["libraries"] != Json(identity.libraries)) {
    return differs("libraries", value["libraries"].dump(), Json(identity.libraries).dump());
  }
  return {};
}

}  // namespace flashoverlap::tune
