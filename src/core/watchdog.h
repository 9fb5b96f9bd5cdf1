#pragma once

#include <functional>
#include <string>

/// Reports for the moment when something has gone wrong, see include/flashoverlap/watchdog.h.
namespace flashoverlap::core {

/// As long as it lives, reports contain what `describe` returns: one JSON value. Called from any thread, so
/// it must take locks of its own, and must not report.
class WatchdogSource {
 public:
  WatchdogSource(std::string section, std::function<std::string()> describe);
  ~WatchdogSource();
  WatchdogSource(const WatchdogSource&) = delete;
  WatchdogSource& operator=(const WatchdogSource&) = delete;
};

/// Writes the report when a file is set, else does nothing. `file_suffix` keeps the files of several
/// processes apart. The first report of a process with a given suffix stays: what follows a failure is less
/// telling.
/// `communicators`: one JSON value, where whoever failed holds locks that a source would need; empty: none.
void write_watchdog_report(const std::string& file_suffix, const std::string& reason,
                           const std::string& communicators = {}) noexcept;

}  // namespace flashoverlap::core
