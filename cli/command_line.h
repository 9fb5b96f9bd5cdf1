#pragma once

namespace flashoverlap::cli {

/// All that `flashoverlap` does with its command line. Returns the exit code (exit_codes.h) and throws
/// nothing.
int run_command_line(int argc, char** argv);

}  // namespace flashoverlap::cli
