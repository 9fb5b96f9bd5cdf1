#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "flashoverlap/tuning_cache.h"

namespace flashoverlap::tune {

inline constexpr std::string_view kCacheSchema = "flashoverlap.tuning-cache/1";

/// With identity, version and checksum.
nlohmann::ordered_json entry_json(const TuningEntry& entry, const MachineIdentity& identity);

/// Throws Error(kFile) naming `path` (in the file) and `origin` for a field that is missing, ill-typed or out
/// of range, and for a checksum that does not fit.
TuningEntry read_entry(const nlohmann::json& value, const std::string& path, const std::string& origin);

/// Why the entry, sound as it is, does not hold here; empty: it holds.
std::string mismatch(const nlohmann::json& value, const MachineIdentity& identity);

}  // namespace flashoverlap::tune
