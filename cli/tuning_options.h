#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "flashoverlap/call_tuner.h"
#include "gpu_machine.h"
#include "gpu_options.h"
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

/// Threads of each rank: `threads` where it is not 0, otherwise cores / ranks, at least 1.
std::int64_t threads_per_rank(std::int64_t threads, std::int64_t ranks);

/// Where `flashoverlap profile` puts the profile of this machine with so many ranks and threads, and the
/// others look for it: next to the tuning cache. Empty when there is no place for it.
std::string default_profile_path(std::int64_t ranks, std::int64_t threads);

/// The same for `flashoverlap profile --backend cuda`.
std::string default_gpu_profile_path(std::int64_t ranks, const GpuOptions& gpu, const GpuMachine& machine);

/// What tuning results of this machine are kept under.
MachineIdentity this_machine();

/// "in-process 1 GB/s 10 us", "in-process" when not paced. `name`: of the communicator.
std::string communicator_name(const LinkModel& link, const std::string& name = "in-process");

/// Empty with --no-cache, or where there is no place for one.
std::string cache_path(const TuningOptions& options);

/// The profile that --machine names, or this machine's for so many ranks of so many threads, or none. Throws
/// Error for one that is named and cannot be used; one that is not named and cannot be used is warned of.
std::optional<MachineProfile> find_machine(const TuningOptions& options, std::int64_t ranks,
                                           std::int64_t threads);

/// The same of this machine's GPUs.
std::optional<MachineProfile> find_gpu_machine(const TuningOptions& options, std::int64_t ranks,
                                               const GpuOptions& gpu, const GpuMachine& machine);

/// One line on stderr.
void warn(const std::string& text);

/// What `run` gives to its contexts of `threads` threads. Where there is no machine profile, one is made of
/// what this run knows anyway: the GEMM that it timed, where there is one, and the link that it is paced to.
/// `on_choice` hears of the cut of slices and of the way to overlap, too: the explanation says which.
std::shared_ptr<const CallTuner> make_tuner(const TuningOptions& options, std::int64_t ranks,
                                            std::int64_t threads, const LinkModel& link,
                                            const std::optional<GemmSample>& gemm,
                                            const std::function<void(const TunedCall&)>& on_choice);

/// What `run --backend cuda` gives to its contexts. Where `gpu` has no communication SMs, and the tuning
/// cache has an entry of exactly this problem that overlaps, `gpu` gets that one's.
std::shared_ptr<const CallTuner> make_gpu_tuner(const TuningOptions& options, const ProblemOptions& problem,
                                                const LinkModel& link, const GpuMachine& machine,
                                                GpuOptions& gpu,
                                                const std::function<void(const TunedCall&)>& on_choice);

/// What the problem's tuning result is kept under. `units` of one rank; `communicator`: communicator_name.
TuningKey tuning_key(const ProblemOptions& problem, std::int64_t units, const std::string& communicator);

}  // namespace flashoverlap::cli
