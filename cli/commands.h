#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "exit_codes.h"  // IWYU pragma: export

/// The subcommands of `flashoverlap`, one per file: `<name>_command.cpp`.
namespace flashoverlap::cli {

/// Carries out the chosen subcommand once all options have been read, and returns the exit code.
using Action = std::function<int()>;

/// Each adds one subcommand to `app`. When that subcommand is on the command line, parsing it sets `action`.
void add_run_command(CLI::App& app, Action& action);
void add_plan_command(CLI::App& app, Action& action);
void add_doctor_command(CLI::App& app, Action& action);
void add_profile_command(CLI::App& app, Action& action);
void add_tune_command(CLI::App& app, Action& action);
void add_simulate_command(CLI::App& app, Action& action);

}  // namespace flashoverlap::cli
