#include "gpu_ranks.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <thread>

#include "flashoverlap/in_process.h"
#include "nccl_library.h"
#include "sm_partition.h"

namespace flashoverlap::gpu_test {

const char* name_of(CommunicatorKind kind) {
  return kind == CommunicatorKind::kNccl ? "nccl" : "local";
}

std::string why_no_nccl(int world_size) {
  try {
    const cuda::NcclLibrary& library = cuda::nccl();
    if (world_size > 1 && library.version < cuda::kNcclSharedGpuVersion) {
      return "NCCL " + cuda::nccl_version_text(library.version) + " does not let ranks share a GPU";
    }
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

std::vector<CommunicatorKind> kinds_for(int world_size) {
  std::vector<CommunicatorKind> kinds{CommunicatorKind::kLocal};
  if (why_no_nccl(world_size).empty()) kinds.push_back(CommunicatorKind::kNccl);
  return kinds;
}

Group::Group(const GroupOptions& options)
    : options_(options), ranks_(static_cast<std::size_t>(options.world_size)) {
  const int ctas = std::max(1, options.communication_sms / options.world_size);
  std::vector<GpuPartition> partitions(ranks_.size());
  if (options.partitions) {
    const int left = cuda::splittable_sms(0) - options.communication_sms;
    const int compute = options.compute_sms > 0 ? options.compute_sms
                                                : left / options.world_size / cuda::kSmGroup * cuda::kSmGroup;
    partitions = make_rehearsal(0, options.world_size, compute, options.communication_sms);
  }
  const auto controls =
      make_in_process_communicators(options.world_size, {.link = {}, .timeout = options.timeout});
  std::vector<std::shared_ptr<Communicator>> locals;
  if (options.kind == CommunicatorKind::kLocal) {
    locals =
        make_local_gpu_communicators(std::vector<int>(ranks_.size(), 0),
                                     {.link = options.link, .max_ctas = ctas, .timeout = options.timeout});
  }
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    ranks_[r].rank = static_cast<int>(r);
    ranks_[r].world_size = options.world_size;
    ranks_[r].options = {.device = 0,
                         .communication_sms = options.communication_sms,
                         .split = SmSplit::kGrid,
                         .wait = options.wait,
                         .partition = partitions[r],
                         .workspace_limit_bytes = 0,
                         .poison_workspace = options.poison,
                         .gemm_variant = options.gemm_variant,
                         .serial_by_cublas = options.serial_by_cublas,
                         .measure_serial = true};
    if (!locals.empty()) ranks_[r].communicator = locals[r];
  }
  run([&](Rank& rank) {
    if (options.kind == CommunicatorKind::kNccl) {
      rank.communicator = make_nccl_communicator(controls[static_cast<std::size_t>(rank.rank)],
                                                 {.device = 0, .max_ctas = ctas, .timeout = options.timeout});
    }
    rank.context =
        std::make_unique<Context>(rank.communicator, make_cuda_executor(rank.communicator, rank.options));
    rank.stream = make_cuda_stream(rank.options);
  });
}

std::vector<std::string> Group::run_all(const std::function<void(Rank&)>& body, bool abort_on_error) {
  std::vector<std::string> errors(ranks_.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(ranks_[r]);
      } catch (const std::exception& error) {
        errors[r] = error.what();
        if (abort_on_error && ranks_[r].communicator != nullptr) ranks_[r].communicator->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void Group::run(const std::function<void(Rank&)>& body) {
  const std::vector<std::string> errors = run_all(body, true);
  const auto is_own = [](const std::string& text) {
    return !text.empty() && text.find("aborted") == std::string::npos;
  };
  auto first = std::find_if(errors.begin(), errors.end(), is_own);
  if (first == errors.end())
    first = std::find_if(errors.begin(), errors.end(), [](const auto& text) { return !text.empty(); });
  if (first != errors.end())
    throw std::runtime_error("rank " + std::to_string(first - errors.begin()) + ": " + *first);
}

namespace {

std::map<std::pair<int, CommunicatorKind>, std::unique_ptr<Group>>& shared_groups() {
  static std::map<std::pair<int, CommunicatorKind>, std::unique_ptr<Group>> groups;
  return groups;
}

}  // namespace

void release_shared_groups() {
  shared_groups().clear();
}

Group& shared_group(int world_size, CommunicatorKind kind) {
  auto& group = shared_groups()[{world_size, kind}];
  if (group == nullptr) {
    // Few SMs each, so that small matrices have several waves.
    GroupOptions options;
    options.world_size = world_size;
    options.kind = kind;
    options.compute_sms = cuda::kSmGroup;
    group = std::make_unique<Group>(options);
  }
  return *group;
}

}  // namespace flashoverlap::gpu_test
