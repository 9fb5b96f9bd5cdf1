#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashoverlap/communicator.h"
#include "flashoverlap/executor.h"
#include "flashoverlap/in_process.h"

/// GPUs: communicators on device memory and the executor that carries plans out there. Only in builds with
/// CUDA.
namespace flashoverlap {

namespace cuda {
class SmPartition;
}

/// Devices that this process can use; 0 without a driver or a GPU. Never throws.
[[nodiscard]] int cuda_device_count() noexcept;

/// What NCCL knows of the memory that the executor's transfers move: the packed buffer, in which sums are
/// taken, and the one that messages are received in. Memory of the caller's is never registered, nor is what
/// plans of one group use; and where a plan sends from one to the other, its workspace is plain.
enum class NcclBuffers {
  kPlain,  ///< Nothing.
  /// ncclCommRegister: all-to-alls copy straight from one rank's memory into another's. Sums
  /// in place, as the executor's are, gain nothing.
  kRegistered,
  /// Windows of ncclCommWindowRegister, with NCCL_WIN_COLL_SYMMETRIC: for all-reduces and
  /// reduce-scatters NCCL has kernels that need fewer SMs; all-to-alls as with kRegistered. Where it can map
  /// the memory of all GPUs of a host into one another's address space.
  kSymmetric,
};

struct NcclOptions {
  int device = 0;
  int max_ctas = 0;  ///< SMs that one of this communicator's calls may take at once; 0: NCCL's own choice.
  std::chrono::milliseconds timeout{60'000};
  /// The same on every rank. Other than kPlain: in the first call of a plan (a layer of experts may make
  /// plans in every call) the ranks agree on the host on how much memory it takes. Where that is more than
  /// before, they register new memory, for which the call waits for those before it, and which is not given
  /// back before the next such call. That first call cannot be captured in a CUDA graph. Not for ranks that
  /// share a GPU, nor for an NCCL older than 2.30.7: Error(kUnsupported). One rank alone has kPlain.
  NcclBuffers buffers = NcclBuffers::kPlain;
};

/// An NCCL communicator of the ranks of `control`, a communicator on the host (in-process for threads, MPI
/// for processes), which carries the rendezvous and every `exchange`. Collective and blocking. Ranks may
/// share a GPU with NCCL >= 2.30.7; the sum of their max_ctas must then fit the SMs that their communication
/// streams may use, because an NCCL block needs an SM to itself and all of a call's blocks wait for each
/// other. libnccl.so.2 is loaded at run time (FLASHOVERLAP_NCCL_LIBRARY overrides its path).
/// Error(kUnsupported) on every rank when any has no NCCL or no device.
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Communicator> control,
                                                     const NcclOptions& options);

/// Who moves bytes between ranks of one host. Sums are taken by kernels: of the other ranks' memory, or of
/// what the copy engine has brought.
enum class PeerCopy {
  kKernel,      ///< Blocks on SMs.
  kCopyEngine,  ///< cudaMemcpyAsync: takes no SM, so a GEMM that waits for slices can have them all.
};

struct LocalGpuOptions {
  LinkModel link;    ///< As for the in-process communicator; 0: as fast as the copies go.
  int max_ctas = 8;  ///< Blocks of one rank's copy and reduction kernels.
  PeerCopy copies = PeerCopy::kKernel;
  std::chrono::milliseconds timeout{60'000};
};

/// Communicators for ranks that are threads of this process, rank r on devices[r] (which may repeat;
/// different devices need peer access). Kernels read the peers' memory directly; sums are taken in rank order
/// in float32, so results are bitwise repeatable. A call waits on the host until every rank has made it, so
/// it cannot be captured in a CUDA graph.
std::vector<std::shared_ptr<Communicator>> make_local_gpu_communicators(const std::vector<int>& devices,
                                                                        const LocalGpuOptions& options = {});

/// The same for ranks that are processes of one host: `control` (MPI or rendezvous) brings them together, and
/// carries every `exchange`. Collective and blocking. What other ranks read or write must then come from
/// cudaMalloc: the executor's workspace does, the caller's A or B of an all-gather must (PyTorch's does
/// without expandable segments), as must its output where the serial method sums in it. Error(kUnsupported)
/// on every rank when the ranks are on several hosts, or a device cannot address another's memory: use NCCL.
std::shared_ptr<Communicator> make_local_gpu_communicator(std::shared_ptr<Communicator> control, int device,
                                                          const LocalGpuOptions& options = {});

/// How the SMs of a GPU are shared between the GEMM and the communication.
enum class SmSplit {
  kGrid,   ///< The GEMM's grid leaves `communication_sms` free; the hardware puts blocks where it likes.
  kGreen,  ///< Green contexts: exact and disjoint, in multiples of 8.
};

/// How the communication stream waits for a wave group.
enum class GroupWait {
  kKernel,  ///< A one-thread kernel: 2.3 us to the next kernel's start on an H200, takes a slot on an SM.
  kStreamMemory,  ///< cuStreamWaitValue32: 9.2 us there, takes none.
};

/// Who adds up the partial sums of an all-reduce or a reduce-scatter that is overlapped.
enum class SumBy {
  kCommunicator,  ///< The collective, on SMs that the GEMM leaves to it.
  /// The restore kernel, behind the GEMM: each rank only copies the others' partial sums of what it keeps,
  /// with PeerCopy::kCopyEngine on no SM. For ranks of one host (make_local_gpu_communicators and
  /// make_local_gpu_communicator), else Error(kUnsupported). Takes the workspace of W - 1 more packed
  /// buffers. An all-reduce moves W - 1 matrices to each rank instead of 2 (W - 1) / W: as much between two
  /// ranks, more between others. The sum is taken in float32 in the order of ranks and rounded after the
  /// epilogue only.
  kRestore,
};

/// Where results that travel by puts (MoeTransport::kPut) are received.
enum class PutMemory {
  /// What the ranks of a local communicator share anyway: the threads' memory, or CUDA IPC between processes
  /// of one host. No puts with other communicators.
  kCommunicator,
  /// NVSHMEM's symmetric heap, beside any communicator, NCCL's too. Each rank is a process, and its GPU can
  /// reach the others' memory (nvshmem_ptr): by NVLink or PCIe within a host, also several ranks on one GPU,
  /// or by an NVLink domain of several hosts. Making the executor is then collective, and throws on every
  /// rank: Error(kUnsupported) without libnvshmem_host.so.3 of 3.4.5 or later (loaded at run time;
  /// FLASHOVERLAP_NVSHMEM_LIBRARY names another), for ranks that are threads, and naming ranks that cannot be
  /// reached; Error(kOutOfMemory); Error(kTimeout). NVSHMEM is initialised once in a process, by the first
  /// such executor, which therefore is one for all ranks, and stays until the process ends.
  kNvshmem,
};

/// How the GEMM of a plan is launched.
enum class GemmForm {
  /// One persistent GEMM: its tiles wait on the device for the slices that they need, and count themselves
  /// where a transfer follows.
  kPersistent,
  /// For comparison: the same plan, transfers and order, with one GEMM launch for each slice that arrives or
  /// leaves. Streams wait for one another by events, nothing waits on an SM, so no SM need be left to
  /// communication. Each launch ends with a wave that may be half empty. The same bits, but for AllToAllGemm
  /// where it begins tiles early: its launches wait for whole strips of rows. Results that travel by puts
  /// (MoeLayer with MoeTransport::kPut) are sent off by a persistent GEMM all the same.
  kDecomposed,
};

/// The SMs of one rank: one entry of `make_rehearsal`, or null for a rank that has its GPU to itself.
struct GpuPartition {
  std::shared_ptr<cuda::SmPartition> compute;
  std::shared_ptr<cuda::SmPartition> communication;  ///< May be shared by several ranks.
};

struct CudaOptions {
  int device = 0;
  int communication_sms =
      16;  ///< Left to communication by every plan's GEMM; 0: overlap by time slices only. Not by those whose
           ///< results travel by puts: these leave what the plan says (MoeLayerOptions::consumers).
  SmSplit split = SmSplit::kGrid;
  GroupWait wait = GroupWait::kKernel;
  SumBy sums = SumBy::kCommunicator;
  GemmForm form = GemmForm::kPersistent;
  PutMemory put_memory = PutMemory::kCommunicator;
  /// With PutMemory::kNvshmem: what the first executor of a process takes of the symmetric heap, for the
  /// receive buffers of all (the most that any rank asks for, on each). Two buffers, each half as large again
  /// as what a call receives; where that is more than is free, the call throws Error(kOutOfMemory).
  std::int64_t put_memory_bytes = std::int64_t{1} << 30U;
  GpuPartition partition;                  ///< Set: `communication_sms` and `split` are ignored.
  std::int64_t workspace_limit_bytes = 0;  ///< Error(kOutOfMemory) when a plan needs more; 0: no limit.
  bool poison_workspace = false;           ///< Fill workspaces with NaN before each call (tests).
  std::string gemm_variant;                ///< The signal GEMM to use, by its name; empty: chosen per shape.
  bool serial_by_cublas = true;            ///< Plans of one group: cuBLAS; false: the signal GEMM, too.
  bool measure_serial = true;  ///< Serial plans: take cuBLAS's best algorithm by measurement, not its first.
};

/// One GPU stands for several: `world_size` ranks with `compute_sms` each, and one partition of
/// `communication_sms` that they share; multiples of 8. Error(kBadArgument) when the device has not as many
/// SMs in groups of 8.
[[nodiscard]] std::vector<GpuPartition> make_rehearsal(int device, int world_size, int compute_sms,
                                                       int communication_sms);

/// A stream for a rank's calls that stays on the rank's SMs. Without a partition an ordinary non-blocking
/// stream.
[[nodiscard]] std::unique_ptr<Stream> make_cuda_stream(const CudaOptions& options);
/// The cudaStream_t of a stream made here, for Operands::stream.
[[nodiscard]] void* native_handle(Stream& stream);

/// The executor for GPUs. `execute` puts everything into Operands::stream and returns; it can be captured in
/// a CUDA graph with an NCCL communicator (capture with cudaStreamCaptureModeThreadLocal). A plan of one
/// group that covers the whole output is carried out as the serial baseline: cuBLAS, one collective, one
/// epilogue kernel. Element types bf16 and f16.
[[nodiscard]] std::unique_ptr<Executor> make_cuda_executor(std::shared_ptr<Communicator> communicator,
                                                           const CudaOptions& options);

}  // namespace flashoverlap
