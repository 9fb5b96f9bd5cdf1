#include "tuning_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <span>
#include <thread>

#include "flashoverlap/cpu_executor.h"
#include "machine_probe.h"
#include "tune_request.h"

namespace flashoverlap::cli {
namespace {

std::string in_brackets(const std::string& text) {
  return text.empty() ? "" : fmt::format(" ({})", text);
}

}  // namespace

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

namespace {

/// Empty when there is no place for it.
std::string beside_cache(const std::string& name) {
  const std::string cache = TuningCache::default_path();
  return cache.empty() ? "" : (std::filesystem::path(cache).parent_path() / name).string();
}

/// The profile at `path` where it is of this machine; one that is not is warned of.
std::optional<MachineProfile> read_profile(const std::string& path, const MachineIdentity& here) {
  if (path.empty() || !std::filesystem::exists(path)) return std::nullopt;
  try {
    MachineProfile machine = load_machine_profile(path);
    const Provenance& of = machine.provenance;
    if (of.device == here.device && of.driver == here.driver && of.libraries == here.libraries)
      return machine;
    warn(fmt::format("{} is of '{}'{}, this is '{}'{}: not used; run flashoverlap profile again", path,
                     of.device, in_brackets(of.driver), here.device, in_brackets(here.driver)));
  } catch (const Error& error) {
    warn(fmt::format("{}; not used, run flashoverlap profile again", error.what()));
  }
  return std::nullopt;
}

}  // namespace

std::string default_profile_path(std::int64_t ranks, std::int64_t threads) {
  return beside_cache(fmt::format("machine-{}x{}.json", ranks, threads));
}

std::string default_gpu_profile_path(std::int64_t ranks, const GpuOptions& gpu, const GpuMachine& machine) {
  // Ranks that share a device have as many SMs as their number and the communication leave them.
  const std::string shared = machine.shares_devices ? fmt::format("-sharing-{}", gpu.sms(true)) : "";
  return beside_cache(fmt::format("gpus-{}-{}{}.json", ranks, gpu.communicator, shared));
}

MachineIdentity this_machine() {
  const Machine machine = probe_machine();
  return {.device = fmt::format("{}, {} cores", machine.processor, machine.cores),
          .driver = "",
          .libraries = {{"blas", cpu_blas_name()}}};
}

std::string communicator_name(const LinkModel& link, const std::string& name) {
  if (link.bandwidth_gbps == 0 && link.latency_us == 0) return name;
  return fmt::format("{} {:.3g} GB/s {:.3g} us", name, link.bandwidth_gbps, link.latency_us);
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
  return read_profile(default_profile_path(ranks, threads), this_machine());
}

std::optional<MachineProfile> find_gpu_machine(const TuningOptions& options, std::int64_t ranks,
                                               const GpuOptions& gpu, const GpuMachine& machine) {
  if (!options.machine.empty()) return load_machine_profile(options.machine);
  return read_profile(default_gpu_profile_path(ranks, gpu, machine), machine.identity);
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

TuningKey tuning_key(const ProblemOptions& problem, std::int64_t units, const std::string& communicator) {
  return {.operation = std::string(name_of(problem.op)),
          .m = problem.m,
          .n = problem.n,
          .k = problem.k,
          .dtype = problem.dtype,
          .world_size = problem.ranks,
          .units = units,
          .epilogue = "any",
          .variant = tuning_variant(problem),
          .communicator = communicator};
}

namespace {

/// Communication units of the key's entry, where there is one and it overlaps; otherwise -1.
std::int64_t tuned_sms(const std::string& path, const MachineIdentity& identity, const TuningKey& key) {
  if (path.empty()) return -1;
  try {
    const auto entry = TuningCache(path, identity, nullptr).find(key);
    return entry && entry->partition.size() > 1 ? entry->resources.communication_units : -1;
  } catch (const Error&) {  // the tuner, which reads the same file, has said what is wrong with it
    return -1;
  }
}

}  // namespace

std::shared_ptr<const CallTuner> make_gpu_tuner(const TuningOptions& options, const ProblemOptions& problem,
                                                const LinkModel& link, const GpuMachine& machine,
                                                GpuOptions& gpu,
                                                const std::function<void(const TunedCall&)>& on_choice) {
  CallTuner::Options tuner;
  if (std::optional<MachineProfile> profile = find_gpu_machine(options, problem.ranks, gpu, machine))
    tuner.machine = paced(*profile, link);
  tuner.cache_path = cache_path(options);
  tuner.identity = machine.identity;
  tuner.communicator = communicator_name(link, gpu.communicator_text());
  tuner.units = machine.units;
  tuner.warn = warn;
  tuner.on_choice = on_choice;
  auto made = std::make_shared<const CallTuner>(std::move(tuner));
  if (gpu.communication_sms.empty() && !machine.shares_devices) {
    const std::int64_t tuned =
        tuned_sms(cache_path(options), machine.identity,
                  tuning_key(problem, machine.units, communicator_name(link, gpu.communicator_text())));
    if (tuned >= 0) gpu.communication_sms = {tuned};
  }
  return made;
}

}  // namespace flashoverlap::cli
