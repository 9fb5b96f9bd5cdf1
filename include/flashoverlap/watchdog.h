#pragma once

#include <string>

namespace flashoverlap {

/// When a communicator fails (an error, a time-out, an abort), a report is written to this file: one JSON
/// object with the error, and for each rank of the process its last calls, the calls that its streams are in,
/// what they wait for, and how far the plan in progress has come (tiles of each wave group, transfers). Where
/// ranks are processes, each writes its own: ".rank3" is appended. An existing file is replaced; of several
/// failures the first stays.
///
/// Replaces FLASHOVERLAP_WATCHDOG; empty: no report. docs/operations.md describes the fields.
void set_watchdog_file(const std::string& path);

/// The file in force: what was set, else the value of FLASHOVERLAP_WATCHDOG, else empty.
[[nodiscard]] std::string watchdog_file();

}  // namespace flashoverlap
