// Ranks as the tests and benchmarks run them: threads of this process, all on device 0 with SMs of their own,
// or each on a device of its own; or this process as one rank of several.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "flashoverlap/cuda_context.h"
#include "flashoverlap/launcher.h"
#include "flashoverlap/operators.h"

namespace flashoverlap::gpu_test {

/// FLASHOVERLAP_TEST_PATIENCE, or 1: time-outs are this many times as long. For tools under which kernels
/// take many times as long.
int patience();

/// kNcclRegistered, kNcclSymmetric: kNccl with these NcclBuffers. kTwoStep: kLocal whose copies are the copy
/// engine's. kCopyEngine: the same, and partial sums are added by the restore kernel, so that nothing takes
/// an SM.
enum class CommunicatorKind { kNccl, kNcclRegistered, kNcclSymmetric, kLocal, kTwoStep, kCopyEngine };
const char* name_of(CommunicatorKind kind);

constexpr GemmForm kForms[] = {GemmForm::kPersistent, GemmForm::kDecomposed};
const char* name_of(GemmForm form);

/// Where ranks run from now on. Neither called: all on device 0.
/// Rank r of a group runs on devices[r] where there are as many; larger groups share device 0.
void use_devices(std::vector<int> devices);
/// This process is one rank of the launcher's, on the device of its number on the host; where there are fewer
/// devices than processes, all are on device 0. Groups have this one rank here; one of another size throws
/// Skip.
void use_processes(const Launch& launch);
/// At the end: the launcher's ranks let go of each other.
void leave_processes();
bool ranks_are_processes();
/// Of matrices that other ranks read.
cuda::DeviceMemory readable_memory();
/// Whether each rank of such a group has a device of its own.
bool has_devices_for(int world_size);
/// World sizes that the tests go through: 2 to 4, or to the number of devices; the job's size alone.
std::vector<int> world_sizes();

/// Why NCCL cannot be used for `world_size` ranks here; empty: it can.
std::string why_no_nccl(int world_size);
/// The same of kNcclRegistered or kNcclSymmetric; or why they are no other than kNccl.
std::string why_no_buffers(int world_size, CommunicatorKind kind);
/// Those of the kinds that work here for `world_size` ranks.
std::vector<CommunicatorKind> kinds_for(int world_size);

struct GroupOptions {
  int world_size = 2;
  CommunicatorKind kind = CommunicatorKind::kLocal;
  int communication_sms = 24;  ///< Of each device, shared by the ranks on it.
  int compute_sms = 0;         ///< Per rank; 0: what is left, divided.
  bool limits_nccl = true;     ///< NCCL's calls take no more SMs than that; false: as many as it likes.
  bool partitions = true;      ///< false: ranks share all SMs of a device.
  std::chrono::milliseconds timeout{std::int64_t{20'000} * patience()};
  GroupWait wait = GroupWait::kKernel;
  bool serial_by_cublas = true;
  bool poison = true;
  LinkModel link;
  std::string gemm_variant;
  PutMemory put_memory = PutMemory::kCommunicator;
  std::int64_t put_memory_bytes = CudaOptions{}.put_memory_bytes;
};

/// The smallest world, in which each rank computes on 8 SMs: several waves, so that tiles wait for each
/// other.
GroupOptions few_sms(CommunicatorKind kind);

/// One rank: its communicator, its context and a stream on its SMs.
struct Rank {
  int rank = 0;
  int world_size = 1;
  CudaOptions options;
  std::shared_ptr<Communicator> communicator;
  std::unique_ptr<Context> context;
  std::unique_ptr<Context> decomposed;  ///< The same with GemmForm::kDecomposed.
  std::unique_ptr<Stream> stream;
  [[nodiscard]] Context& context_of(GemmForm form) const {
    return form == GemmForm::kPersistent ? *context : *decomposed;
  }
  [[nodiscard]] void* native_stream() const { return native_handle(*stream); }
};

class Group {
 public:
  explicit Group(const GroupOptions& options);
  [[nodiscard]] const GroupOptions& options() const { return options_; }
  /// Of those in this process.
  [[nodiscard]] int first_rank() const { return ranks_.front().rank; }
  /// Calls `body` on one thread per rank of this process, with the rank's device current, and waits. The
  /// first rank's error (not one that another rank's abort caused, where there is a choice) is thrown here,
  /// with the rank in front.
  void run(const std::function<void(Rank&)>& body);
  /// Of a rank in this process.
  [[nodiscard]] const std::shared_ptr<Communicator>& communicator_of(int rank) const;
  /// The same without abort and throw: each rank's error text, empty where there is none or the rank is in
  /// another process.
  std::vector<std::string> run_all(const std::function<void(Rank&)>& body, bool abort_on_error);

 private:
  void place_ranks();
  [[nodiscard]] std::vector<std::shared_ptr<Communicator>> make_locals() const;
  void connect(Rank& rank, const std::vector<std::shared_ptr<Communicator>>& controls,
               const std::vector<std::shared_ptr<Communicator>>& locals) const;

  GroupOptions options_;
  int ctas_ = 1;             // of one rank's calls
  std::vector<Rank> ranks_;  // those of this process
};

/// A group with these options that lives until release_shared_groups; making NCCL communicators takes longer
/// than most tests. Tests that break their communicators make their own.
Group& shared_group(int world_size, CommunicatorKind kind);
/// Destroys them; to be called before main returns, while CUDA and NCCL are still there.
void release_shared_groups();

}  // namespace flashoverlap::gpu_test
