#include "core/watchdog.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <list>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "core/host_name.h"
#include "flashoverlap/version.h"
#include "flashoverlap/watchdog.h"

namespace flashoverlap {
namespace core {
namespace {

using nlohmann::json;

struct Registry {
  std::mutex mutex;
  std::optional<std::string> path;
  std::map<const WatchdogSource*, std::pair<std::string, std::function<std::string()>>> sources;
  std::set<std::string> written;
};

Registry& registry() {
  static auto* const instance = new Registry;  // Sources may outlive other static objects.
  return *instance;
}

json report_of(const Registry& all, const std::string& reason, const std::string& communicators) {
  json report = {{"flashoverlap", kVersion},
                 {"time", fmt::format("{:%FT%TZ}", fmt::gmtime(std::time(nullptr)))},
                 {"host", core::host_name()},
                 {"process", getpid()},
                 {"error", reason}};
  for (const auto& [source, section] : all.sources) {
    json& list = report[section.first];
    if (list.is_null()) list = json::array();
    json value = json::parse(section.second(), nullptr, false);
    if (!value.is_discarded() && !value.is_null()) list.push_back(std::move(value));
  }
  if (!communicators.empty()) report["communicators"].push_back(json::parse(communicators, nullptr, false));
  return report;
}

// By way of another file, so that whoever reads it never sees half of it.
void replace_file(const std::string& path, const std::string& text) {
  const std::string unfinished = fmt::format("{}.{}", path, getpid());
  std::ofstream file(unfinished);
  file << text << '\n';
  file.close();
  if (file && std::rename(unfinished.c_str(), path.c_str()) == 0) return;
  std::remove(unfinished.c_str());
  fmt::print(stderr, "flashoverlap: cannot write the watchdog report to {}\n", path);
}

}  // namespace

WatchdogSource::WatchdogSource(std::string section, std::function<std::string()> describe) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.sources[this] = {std::move(section), std::move(describe)};
}

WatchdogSource::~WatchdogSource() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.sources.erase(this);
}

void write_watchdog_report(const std::string& file_suffix, const std::string& reason,
                           const std::string& communicators) noexcept {
  try {
    const std::string path = watchdog_file();
    if (path.empty()) return;
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    if (!all.written.insert(path + file_suffix).second) return;
    replace_file(path + file_suffix,
                 report_of(all, reason, communicators).dump(2, ' ', false, json::error_handler_t::replace));
  } catch (...) {
    // A report must not get in the way of the error that it is about.
  }
}

}  // namespace core

void set_watchdog_file(const std::string& path) {
  core::Registry& all = core::registry();
  const std::lock_guard lock(all.mutex);
  all.path = path;
}

std::string watchdog_file() {
  core::Registry& all = core::registry();
  const std::lock_guard lock(all.mutex);
  if (all.path) return *all.path;
  const char* const from_environment = std::getenv("FLASHOVERLAP_WATCHDOG");
  return from_environment == nullptr ? "" : from_environment;
}

}  // namespace flashoverlap
