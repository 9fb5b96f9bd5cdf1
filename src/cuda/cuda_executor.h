// Carries out plans on one GPU.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cuda_stream.h"
#include "device.h"
#include "event_log.h"
#include "flashoverlap/cuda_context.h"
#include "prepared_cuda_plan.h"
#include "sm_partition.h"
#include "wait.h"

namespace flashoverlap::cuda {

/// Knows nothing of all-reduce: it puts into the caller's stream the signal GEMM, into one communication
/// stream per channel for each transfer a wait for its group and the communicator's call, joins them, and
/// puts the restore kernel behind that.
///
/// The producer is always enqueued before its waiters, so one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)
/// is enough for a rank that has its GPU to itself.
class CudaExecutor final : public Executor {
 public:
  CudaExecutor(std::shared_ptr<Communicator> communicator, const CudaOptions& options);
  ~CudaExecutor() override;

  [[nodiscard]] std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) override;
  void execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) override;
  [[nodiscard]] std::int64_t workspace_bytes() const override;
  [[nodiscard]] std::optional<PlanShape> suggest(std::int64_t m, std::int64_t n, std::int64_t k,
                                                 DType dtype) const override;

 private:
  struct Call;

  void check_plan(const OverlapPlan& plan) const;
  void reserve_workspace(PreparedCudaPlan& plan);
  void throw_if_wait_failed();
  void enqueue(Call& call);
  void enqueue_serial(Call& call);
  void enqueue_gemm(Call& call);
  void enqueue_transfers(Call& call);
  void enqueue_transfer(Call& call, std::size_t index);
  void wait_for_group(const Call& call, std::int64_t group, cudaStream_t stream);
  void enqueue_restore(Call& call);
  void fill_for_empty_k(Call& call);
  CudaStream& channel(std::int32_t index);
  [[nodiscard]] void* region(const Call& call, const Region& region) const;
  [[nodiscard]] cudaStream_t gemm_stream(cudaStream_t caller);

  std::shared_ptr<Communicator> communicator_;
  CudaOptions options_;
  int gemm_sms_ = 0;
  int serial_sms_ = 0;
  std::vector<std::unique_ptr<CudaStream>> channels_;
  std::unique_ptr<CudaStream> compute_stream_;  // where the caller's stream is not on the rank's own SMs
  std::shared_ptr<Workspace> workspace_;
  Event start_;
  Event gemm_done_;
  std::vector<Event> channel_done_;
  Event call_done_;
  bool has_call_ = false;
  WaitError* wait_error_ = nullptr;  // host memory that the device writes
};

}  // namespace flashoverlap::cuda
