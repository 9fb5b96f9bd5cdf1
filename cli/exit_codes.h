#pragma once

namespace flashoverlap::cli {

/// Exit codes of every subcommand.
inline constexpr int kExitSuccess = 0;
inline constexpr int kExitFailure = 1;  ///< The result is wrong, or it could not be reached.
inline constexpr int kExitUsage = 2;    ///< The command line, a file or the machine does not allow the work.

}  // namespace flashoverlap::cli
