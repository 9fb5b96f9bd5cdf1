#include "gpu_ranks.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <stdexcept>
#include <thread>

#include "device.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/rendezvous.h"
#include "gpu_test.h"
#include "nccl_library.h"
#include "runtime_library.h"
#include "sm_partition.h"

namespace flashoverlap::gpu_test {

int patience() {
  static const int value = [] {
    const char* const text = std::getenv("FLASHOVERLAP_TEST_PATIENCE");
    return text == nullptr ? 1 : std::max(1, std::atoi(text));
  }();
  return value;
}

const char* name_of(CommunicatorKind kind) {
  switch (kind) {
    case CommunicatorKind::kNccl:
      return "nccl";
    case CommunicatorKind::kNcclRegistered:
      return "nccl-registered";
    case CommunicatorKind::kNcclSymmetric:
      return "nccl-symmetric";
    case CommunicatorKind::kLocal:
      return "local";
    case CommunicatorKind::kTwoStep:
      return "two-step";
    case CommunicatorKind::kCopyEngine:
      break;
  }
  return "copy-engine";
}

const char* name_of(GemmForm form) {
  return form == GemmForm::kPersistent ? "persistent" : "decomposed";
}

namespace {

struct Places {
  std::vector<int> devices;
  std::shared_ptr<Communicator> control;  // set: ranks are processes
  int own_device = 0;
  bool shares_device = false;  // with other processes

  [[nodiscard]] bool has_devices_for(int world_size) const {
    return control != nullptr || static_cast<std::size_t>(world_size) <= devices.size();
  }
  [[nodiscard]] int device_of(int rank, int world_size) const {
    if (control != nullptr) return own_device;
    return has_devices_for(world_size) ? devices[static_cast<std::size_t>(rank)] : 0;
  }
};

Places& places() {
  static Places all;
  return all;
}

}  // namespace

void use_devices(std::vector<int> devices) {
  places().devices = std::move(devices);
}

void use_processes(const Launch& launch) {
  const int here = launch.local_size > 0 ? launch.local_size : launch.world_size;
  places().control = make_rendezvous_communicator(launch);
  places().shares_device = here > cuda_device_count();
  places().own_device = places().shares_device ? 0 : launch.local_rank;
}

void leave_processes() {
  places() = {};
}

bool ranks_are_processes() {
  return places().control != nullptr;
}

cuda::DeviceMemory readable_memory() {
  return ranks_are_processes() ? cuda::DeviceMemory::kShareable : cuda::DeviceMemory::kStreamOrdered;
}

bool has_devices_for(int world_size) {
  return !places().shares_device && places().has_devices_for(world_size);
}

std::vector<int> world_sizes() {
  if (places().control != nullptr) return {places().control->size()};
  constexpr int kMostOnOneDevice = 4;
  const int most = std::max(kMostOnOneDevice, static_cast<int>(places().devices.size()));
  std::vector<int> sizes;
  for (int size = 2; size <= most; ++size) sizes.push_back(size);
  return sizes;
}

std::string why_no_nccl(int world_size) {
  try {
    const cuda::NcclLibrary& library = cuda::nccl();
    const bool shares = world_size > 1 && !has_devices_for(world_size);
    if (shares && library.version < cuda::kNcclSharedGpuVersion) {
      return "NCCL " + cuda::library_version_text(library.version) + " does not let ranks share a GPU";
    }
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

std::string why_no_buffers(int world_size, CommunicatorKind kind) {
  if (const std::string why = why_no_nccl(world_size); !why.empty()) return why;
  if (world_size < 2 || !has_devices_for(world_size)) return "each of several ranks needs a GPU of its own";
  const cuda::NcclLibrary& library = cuda::nccl();
  if (library.comm_revoke != nullptr) return {};
  return "NCCL " + cuda::library_version_text(library.version) + " has no " + name_of(kind) + " buffers";
}

GroupOptions few_sms(CommunicatorKind kind) {
  GroupOptions options;
  options.world_size = world_sizes().front();
  options.kind = kind;
  options.compute_sms = 8;
  return options;
}

std::vector<CommunicatorKind> kinds_for(int world_size) {
  std::vector<CommunicatorKind> kinds{CommunicatorKind::kLocal, CommunicatorKind::kTwoStep,
                                      CommunicatorKind::kCopyEngine};
  if (why_no_nccl(world_size).empty()) kinds.push_back(CommunicatorKind::kNccl);
  for (const CommunicatorKind kind : {CommunicatorKind::kNcclRegistered, CommunicatorKind::kNcclSymmetric})
    if (why_no_buffers(world_size, kind).empty()) kinds.push_back(kind);
  return kinds;
}

namespace {

/// Nothing for the kinds without NCCL.
std::optional<NcclBuffers> buffers_of(CommunicatorKind kind) {
  switch (kind) {
    case CommunicatorKind::kNccl:
      return NcclBuffers::kPlain;
    case CommunicatorKind::kNcclRegistered:
      return NcclBuffers::kRegistered;
    case CommunicatorKind::kNcclSymmetric:
      return NcclBuffers::kSymmetric;
    default:
      return std::nullopt;
  }
}

}  // namespace

Group::Group(const GroupOptions& options) : options_(options) {
  place_ranks();
  std::vector<std::shared_ptr<Communicator>> controls;
  std::vector<std::shared_ptr<Communicator>> locals;
  if (places().control != nullptr) {
    controls.assign(static_cast<std::size_t>(options.world_size), places().control);
  } else {
    controls = make_in_process_communicators(options.world_size, {.link = {}, .timeout = options.timeout});
  }
  if (!buffers_of(options.kind)) locals = make_locals();
  run([&](Rank& rank) { connect(rank, controls, locals); });
}

// By rank; null for those of other processes.
std::vector<std::shared_ptr<Communicator>> Group::make_locals() const {
  const bool by_engine = options_.kind != CommunicatorKind::kLocal;
  const LocalGpuOptions local{.link = options_.link,
                              .max_ctas = ctas_,
                              .copies = by_engine ? PeerCopy::kCopyEngine : PeerCopy::kKernel,
                              .timeout = options_.timeout};
  if (places().control != nullptr) {
    std::vector<std::shared_ptr<Communicator>> locals(static_cast<std::size_t>(options_.world_size));
    locals[static_cast<std::size_t>(first_rank())] =
        make_local_gpu_communicator(places().control, places().own_device, local);
    return locals;
  }
  std::vector<int> devices;
  for (const Rank& rank : ranks_) devices.push_back(rank.options.device);
  return make_local_gpu_communicators(devices, local);
}

// Which ranks are here, on which devices, and on which of their SMs.
void Group::place_ranks() {
  const Places& all = places();
  const int world = options_.world_size;
  if (all.control != nullptr && all.control->size() != world)
    throw Skip("ranks are " + std::to_string(all.control->size()) + " processes");
  const bool apart = all.has_devices_for(world);
  const int on_one_device = apart ? 1 : world;
  ctas_ = std::max(1, options_.communication_sms / on_one_device);
  const int left = cuda::splittable_sms(all.device_of(0, world)) - options_.communication_sms;
  const int compute = options_.compute_sms > 0 ? options_.compute_sms
                                               : left / on_one_device / cuda::kSmGroup * cuda::kSmGroup;
  std::vector<GpuPartition> shared(static_cast<std::size_t>(world));
  if (options_.partitions && !apart) shared = make_rehearsal(0, world, compute, options_.communication_sms);
  for (int r = 0; r < world; ++r) {
    if (all.control != nullptr && r != all.control->rank()) continue;
    Rank& rank = ranks_.emplace_back();
    rank.rank = r;
    rank.world_size = world;
    rank.options.device = all.device_of(r, world);
    rank.options.communication_sms = options_.communication_sms;
    rank.options.split = SmSplit::kGrid;
    rank.options.wait = options_.wait;
    if (options_.kind == CommunicatorKind::kCopyEngine) rank.options.sums = SumBy::kRestore;
    rank.options.partition = shared[static_cast<std::size_t>(r)];
    // On a device of its own a rank is held to few SMs only where the test wants several waves.
    if (apart && options_.partitions && options_.compute_sms > 0) {
      rank.options.partition =
          make_rehearsal(rank.options.device, 1, compute, options_.communication_sms).front();
    }
    rank.options.poison_workspace = options_.poison;
    rank.options.gemm_variant = options_.gemm_variant;
    rank.options.put_memory = options_.put_memory;
    rank.options.put_memory_bytes = options_.put_memory_bytes;
    rank.options.serial_by_cublas = options_.serial_by_cublas;
    rank.options.measure_serial = true;
  }
}

void Group::connect(Rank& rank, const std::vector<std::shared_ptr<Communicator>>& controls,
                    const std::vector<std::shared_ptr<Communicator>>& locals) const {
  const auto index = static_cast<std::size_t>(rank.rank);
  if (const std::optional<NcclBuffers> buffers = buffers_of(options_.kind)) {
    rank.communicator = make_nccl_communicator(controls[index], {.device = rank.options.device,
                                                                 .max_ctas = options_.limits_nccl ? ctas_ : 0,
                                                                 .timeout = options_.timeout,
                                                                 .buffers = *buffers});
  } else {
    rank.communicator = locals[index];
  }
  rank.context =
      std::make_unique<Context>(rank.communicator, make_cuda_executor(rank.communicator, rank.options));
  CudaOptions decomposed = rank.options;
  decomposed.form = GemmForm::kDecomposed;
  rank.decomposed =
      std::make_unique<Context>(rank.communicator, make_cuda_executor(rank.communicator, decomposed));
  rank.stream = make_cuda_stream(rank.options);
}

const std::shared_ptr<Communicator>& Group::communicator_of(int rank) const {
  const auto found =
      std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.rank == rank; });
  if (found == ranks_.end()) throw std::runtime_error("rank " + std::to_string(rank) + " is not here");
  return found->communicator;
}

std::vector<std::string> Group::run_all(const std::function<void(Rank&)>& body, bool abort_on_error) {
  std::vector<std::string> errors(static_cast<std::size_t>(options_.world_size));
  std::vector<std::thread> threads;
  for (Rank& rank : ranks_) {
    threads.emplace_back([&, at = static_cast<std::size_t>(rank.rank)] {
      try {
        const cuda::DeviceScope scope(rank.options.device);
        body(rank);
      } catch (const std::exception& error) {
        errors[at] = error.what();
        if (abort_on_error && rank.communicator != nullptr) rank.communicator->abort(error.what());
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
