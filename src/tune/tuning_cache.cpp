#include "flashoverlap/tuning_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/error.h"
#include "sim/json_fields.h"
#include "tune/locked_file.h"
#include "tune/tuning_entry_json.h"

namespace flashoverlap {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

void say(const WarningSink& warn, const std::string& text) {
  if (warn) warn(text);
}

/// The entries of a file, unread; throws Error(kFile) when it is no cache of this version.
Json raw_entries(std::string_view text, const std::string& origin) {
  const Json json = sim::parse_json_file(text, origin);
  const sim::JsonFields fields(json, "", origin, {"schema", "entries"});
  if (fields.text("schema") != tune::kCacheSchema) {
    fields.refuse("schema", fmt::format("this version reads \"{}\"", tune::kCacheSchema));
  }
  return fields.array("entries");
}

/// Reads what there is. A file that cannot be used is reported and counts as empty; `refused` then says so.
Json read_or_refuse(const std::string& path, const WarningSink& warn, bool& refused) {
  refused = false;
  const std::optional<std::string> text = tune::read_whole_file(path);
  if (!text) return Json::array();
  try {
    return raw_entries(*text, path);
  } catch (const Error& error) {
    refused = true;
    say(warn, fmt::format("tuning cache refused, calls will be tuned again: {}", error.what()));
    return Json::array();
  }
}

/// `entries` without those of another machine or that are damaged, each with a warning.
std::vector<TuningEntry> usable(const Json& entries, const std::string& origin,
                                const MachineIdentity& identity, const WarningSink& warn) {
  std::vector<TuningEntry> result;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    try {
      TuningEntry entry = tune::read_entry(entries[i], fmt::format("entries[{}]", i), origin);
      const std::string reason = tune::mismatch(entries[i], identity);
      if (reason.empty()) {
        result.push_back(std::move(entry));
      } else {
        say(warn, fmt::format("{}: entries[{}] ({}) ignored: {}", origin, i, to_text(entry.key), reason));
      }
    } catch (const Error& error) {
      say(warn, fmt::format("tuning entry ignored: {}", error.what()));
    }
  }
  return result;
}

/// Same key on the same machine: the new entry takes the old one's place. Others' entries stay as they are,
/// also unreadable ones: they may be of a newer version.
bool replaces(const Json& entry, const OrderedJson& added) {
  if (!entry.is_object()) return false;
  for (const char* field : {"key", "device", "driver", "libraries", "version"}) {
    if (!entry.contains(field) || entry[field] != Json(added[field])) return false;
  }
  return true;
}

double distance(const TuningKey& a, const TuningKey& b) {
  const auto ratio = [](std::int64_t x, std::int64_t y) {
    return std::abs(std::log((static_cast<double>(x) + 1) / (static_cast<double>(y) + 1)));
  };
  return ratio(a.m, b.m) + ratio(a.n, b.n) + ratio(a.k, b.k);
}

}  // namespace

std::string to_text(const TuningKey& key) {
  std::string text =
      fmt::format("{} m={} n={} k={} {}, {} ranks x {} units, epilogue {}", key.operation, key.m, key.n,
                  key.k, name_of(key.dtype), key.world_size, key.units, key.epilogue);
  if (!key.variant.empty()) text += ", " + key.variant;
  return text + ", " + key.communicator;
}

std::vector<TuningEntry> parse_tuning_cache(std::string_view json, const std::string& origin,
                                            const MachineIdentity& identity, const WarningSink& warn) {
  return usable(raw_entries(json, origin), origin, identity, warn);
}

TuningCache::TuningCache(std::string path, MachineIdentity identity, WarningSink warn)
    : path_(std::move(path)), identity_(std::move(identity)), warn_(std::move(warn)) {
  bool refused = false;
  entries_ = usable(read_or_refuse(path_, warn_, refused), path_, identity_, warn_);
}

std::optional<TuningEntry> TuningCache::find(const TuningKey& key) const {
  for (const TuningEntry& entry : entries_) {
    if (entry.key == key) return entry;
  }
  return std::nullopt;
}

std::optional<TuningEntry> TuningCache::nearest(const TuningKey& key) const {
  const double farthest = std::log(8.0);
  const TuningEntry* best = nullptr;
  for (const TuningEntry& entry : entries_) {
    TuningKey same = key;
    same.m = entry.key.m;
    same.n = entry.key.n;
    same.k = entry.key.k;
    same.communicator = entry.key.communicator;
    if (same != entry.key || distance(entry.key, key) > farthest) continue;
    if (best == nullptr || distance(entry.key, key) < distance(best->key, key)) best = &entry;
  }
  if (best == nullptr) return std::nullopt;
  return *best;
}

void TuningCache::store(const TuningEntry& entry) {
  const OrderedJson added = tune::entry_json(entry, identity_);
  try {
    static_cast<void>(tune::read_entry(Json(added), "entry", "new tuning entry"));
  } catch (const Error& error) {
    core::fail(ErrorKind::kBadArgument, "{}", error.what());
  }
  const tune::FileLock lock(path_ + ".lock");
  bool refused = false;
  const Json before = read_or_refuse(path_, nullptr, refused);  // the warning was given at the start
  if (refused) tune::move_aside(path_, path_ + ".refused");
  OrderedJson entries = OrderedJson::array();
  for (const Json& old : before) {
    if (!replaces(old, added)) entries.push_back(OrderedJson(old));
  }
  entries.push_back(added);
  OrderedJson file;
  file["schema"] = tune::kCacheSchema;
  file["entries"] = std::move(entries);
  tune::replace_file(path_, file.dump(1, ' ', true, OrderedJson::error_handler_t::replace) + "\n");
  std::erase_if(entries_, [&](const TuningEntry& old) { return old.key == entry.key; });
  entries_.push_back(entry);
}

std::string TuningCache::default_path() {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  if (std::string path = variable("FLASHOVERLAP_CACHE"); !path.empty()) return path;
  if (const std::string folder = variable("XDG_CACHE_HOME"); !folder.empty())
    return folder + "/flashoverlap/tuning.json";
  if (const std::string home = variable("HOME"); !home.empty())
    return home + "/.cache/flashoverlap/tuning.json";
  return {};
}

std::vector<std::int64_t> scaled_partition(const std::vector<std::int64_t>& partition, std::int64_t waves) {
  double total = 0;
  for (const std::int64_t group : partition) total += static_cast<double>(group);
  std::vector<std::int64_t> scaled;
  double passed = 0;
  std::int64_t begin = 0;
  for (const std::int64_t group : partition) {
    passed += static_cast<double>(group);
    const auto end =
        std::clamp<std::int64_t>(std::llround(passed / total * static_cast<double>(waves)), begin, waves);
    if (end > begin) scaled.push_back(end - begin);
    begin = end;
  }
  if (begin < waves) scaled.push_back(waves - begin);
  return scaled;
}

}  // namespace flashoverlap
