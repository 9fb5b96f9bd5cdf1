#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "flashoverlap/call_tuner.h"
#include "problem_options.h"

/// Machine profile and tuning cache, as run, tune and simulate name them.
namespace flashoverlap::cli {

struct TuningOptions {
  std::string machine;  ///< Name or path; empty: this machine's profile, where there is one.
  std::string cache;    ///< Path; empty: TuningCache::default_path().
  bool no_cache = false;
};

void add_machine_option(CLI::App& app, TuningOptions& options, const std::string& otherwise);
void add_cache_options(CLI::App& app, TuningOptions& options);

/// Threads of each rank: what the options say, or cores / ranks, at least 1.
std::int64_t threads_per_rank(const ProblemOptions& options);

/// Where `flashoverlap profile` puts the profile of this machine with so many ranks and threads, and the
/// others look for it: next to the tuning cache. Empty when there is no place for it.
std::string default_profile_path(std::int64_t ranks, std::int64_t threads);

/// What tuning results of this machine are kept under.
MachineIdentity this_machine();

/// "in-process 1 GB/s 10 us", "in-process" when not paced.
std::string communicator_name(const LinkModel& link);

/// Empty with --no-cache, or where there is no place for one.
std::string cache_path(const TuningOptions& options);

/// The profile that --machine names, or this machine's, or none. Throws Error for one that is named and
/// cannot be used; one that is not named and cannot be used is warned of.
std::optional<MachineProfile> find_machine(const TuningOptions& options, const ProblemOptions& problem);

/// One line on stderr.
void warn(const std::string& text);

/// What `run` gives to its contexts. Where there is no machine profile, one is made of what this run knows
/// anyway: the GEMM that it timed and the link that it is paced to.
std::shared_ptr<const CallTuner> make_tuner(const TuningOptions& options, const ProblemOptions& problem,
                                            const LinkModel& link, const std::optional<GemmSample>& gemm,
                                            std::function<void(const TunedCall&)> on_choice);

}  // namespace flashoverlap::cli
