#include "tuning_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <span>
#include <thread>

#include "flashoverlap/cpu_executor.h"
#include "machine_probe.h"

namespace flashoverlap::cli {

void add_machine_option(CLI::App& app, TuningOptions& options, const std::string& otherwise) {
  std::string names;
  for (const std::string& name : shipped_machine_profiles()) names += (names.empty() ? "" : ", ") + name;
  app.add_option("--machine", options.machine,
                 fmt::format("Machine profile: a file, or one of {}.\nDefault: {}", names, otherwise))
      ->type_name("NAME|FILE");
}

void add_cache_options(CLI::App& app, TuningOptions& options) {
  CLI::Option* cache = app.add_option("--cache", options.cache,
                                      "Tuning cache; default: $FLASHOVERLAP_CACHE, or tuning.json in\n"
                                      "$XDG_CACHE_HOME/flashoverlap or ~/.cache/flashoverlap");
  cache->type_name("FILE");
  app.add_flag("--no-cache", options.no_cache, "Neither read nor write the tuning cache")->excludes(cache);
}

std::int64_t threads_per_rank(std::int64_t threads, std::int64_t ranks) {
  if (threads > 0) return threads;
  const auto cores = static_cast<std::int64_t>(std::thread::hardware_concurrency());  // as Context does
  return std::max<std::int64_t>(1, cores / ranks);
}

std::string default_profile_path(std::int64_t ranks, std::int64_t threads) {
  const std::string cache = TuningCache::default_path();
  if (cache.empty()) return {};
  const std::filesystem::path folder = std::filesystem::path(cache).parent_path();
  return (folder / fmt::format("machine-{}x{}.json", ranks, threads)).string();
}

MachineIdentity this_machine() {
  const Machine machine = probe_machine();
  return {.device = fmt::format("{}, {} cores", machine.processor, machine.cores),
          .driver = "",
          .libraries = {{"blas", cpu_blas_name()}}};
}

std::string communicator_name(const LinkModel& link) {
  if (link.bandwidth_gbps == 0 && link.latency_us == 0) return "in-process";
  return fmt::format("in-process {:.3g} GB/s {:.3g} us", link.bandwidth_gbps, link.latency_us);
}

std::string cache_path(const TuningOptions& options) {
  if (options.no_cache) return {};
  return options.cache.empty() ? TuningCache::default_path() : options.cache;
}

void warn(const std::string& text) {
  fmt::print(stderr, "flashoverlap: warning: {}\n", text);
}

std::optional<MachineProfile> find_machine(const TuningOptions& options, std::int64_t ranks,
                                           std::int64_t threads) {
  if (!options.machine.empty()) return load_machine_profile(options.machine);
  const std::string path = default_profile_path(ranks, threads);
  if (path.empty() || !std::filesystem::exists(path)) return std::nullopt;
  try {
    MachineProfile machine = load_machine_profile(path);
    const MachineIdentity here = this_machine();
    if (machine.provenance.device == here.device && machine.provenance.libraries == here.libraries)
      return machine;
    warn(fmt::format("{} is of '{}', this is '{}': not used; run flashoverlap profile again", path,
                     machine.provenance.device, here.device));
  } catch (const Error& error) {
    warn(fmt::format("{}; not used, run flashoverlap profile again", error.what()));
  }
  return std::nullopt;
}

namespace {

/// A machine profile of one timed GEMM on a paced link.
MachineProfile profile_of_run(const GemmSample& gemm, const LinkModel& link) {
  // What each transfer takes beside the link's time: its thread wakes up while all cores compute, and copies.
  // Assumed, about a time slice of the scheduler; flashoverlap profile measures it.
  constexpr double kTransferUs = 500;
  MachineProfile machine;
  machine.name = "this run";
  machine.provenance.kind = "measured";
  machine.units = gemm.units;
  machine.gemm.kernels = {fit_gemm_kernel(std::span(&gemm, 1), 0, RaggedTiles::kProportional)};
  machine.gemm.samples = {gemm};
  machine.levels = {{.name = "link",
                     .latency_us = link.latency_us + kTransferUs,
                     .bandwidth_gbps = link.bandwidth_gbps,
                     .source = {}}};
  return machine;
}

}  // namespace

std::shared_ptr<const CallTuner> make_tuner(const TuningOptions& options, std::int64_t ranks,
                                            std::int64_t threads, const LinkModel& link,
                                            const std::optional<GemmSample>& gemm,
                                            const std::function<void(const TunedCall&)>& on_choice) {
  CallTuner::Options tuner;
  if (std::optional<MachineProfile> machine = find_machine(options, ranks, threads)) {
    tuner.machine = paced(*machine, link);
  } else if (gemm && gemm->duration_us > 0 && gemm->m > 0 && gemm->n > 0 && gemm->k > 0 &&
             link.bandwidth_gbps > 0) {
    tuner.machine = profile_of_run(*gemm, link);
  }
  tuner.cache_path = cache_path(options);
  tuner.identity = this_machine();
  tuner.communicator = communicator_name(link);
  tuner.warn = warn;
  tuner.on_choice = on_choice;
  tuner.on_parts = [on_choice](const PartsChoice& choice) {
    on_choice(
        {.tile = {}, .partition = {}, .origin = ChoiceOrigin::kPredicted, .explanation = choice.reason});
  };
  tuner.on_overlap = [on_choice](const OverlapDecision& decision) {
    TunedCall chosen = decision.groups;
    chosen.origin = ChoiceOrigin::kPredicted;
    chosen.explanation = decision.reason;
    on_choice(chosen);
  };
  return std::make_shared<const CallTuner>(std::move(tuner));
}

}  // namespace flashoverlap::cli
