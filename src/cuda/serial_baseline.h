// What the overlap is compared with: cuBLAS, then one collective, then one epilogue kernel.
#pragma once

#include <memory>
#include <vector>

#include "cublas_gemm.h"
#include "event_log.h"
#include "flashoverlap/communicator.h"
#include "flashoverlap/executor.h"
#include "flashoverlap/plan.h"
#include "restore.h"

namespace flashoverlap::cuda {

/// The steps of a serial call, worked out from any plan of GEMM + all-reduce, reduce-scatter or all-to-all,
/// or of one all-gather of A or B before the GEMM.
/// Rows that a collective sends to different ranks, and that do not lie in rank order in D, are put in order
/// by one kernel in between.
class SerialBaseline {
 public:
  /// Whether `plan` can be carried out so: its transfers are of one kind, after groups, and that kind is one
  /// of the three; or its only transfer is an all-gather at the start.
  [[nodiscard]] static Verdict can_run(const OverlapPlan& plan);

  SerialBaseline(int device, const OverlapPlan& plan);

  /// Elements of scratch memory that `run` needs.
  [[nodiscard]] std::int64_t scratch_size() const;

  struct Streams {
    cudaStream_t caller = nullptr;  ///< GEMM and epilogue.
    Stream* communication = nullptr;
  };
  /// Puts the GEMM into the caller's stream, the collective into the communication stream and the epilogue
  /// into the caller's. `scratch` holds scratch_size() elements.
  void run(const Operands& operands, Mode mode, void* scratch, int num_sms, bool measure,
           Communicator& communicator, const Streams& streams, EventLog& log);

 private:
  template <class Issue>
  void enqueue_collective(const Streams& streams, EventLog& log, Issue&& issue);
  void run_gather_first(const Operands& operands, Mode mode, int num_sms, bool measure,
                        Communicator& communicator, const Streams& streams, EventLog& log);
  void prepare_gemm(const Operands& operands, void* d, std::int64_t ldd, int num_sms, bool measure,
                    cudaStream_t stream);
  void multiply(const Operands& operands, void* d, std::int64_t ldd, cudaStream_t stream) const;
  void communicate(const void* send, void* receive, Communicator& communicator, Stream& stream) const;
  [[nodiscard]] bool is_permuted() const { return !order_.empty(); }

  int device_;
  OverlapPlan plan_;
  TransferKind kind_ = TransferKind::kAllReduce;
  std::int64_t m_ = 0;
  std::vector<std::int64_t> send_counts_;     // elements per rank
  std::vector<std::int64_t> receive_counts_;  // all-to-all only
  std::vector<std::int64_t> order_;           // row of D at each place of the send buffer; empty: in order
  DeviceBuffer rows_;
  DeviceBuffer pieces_;
  Event fork_;
  Event join_;
  DeviceBuffer gemm_workspace_;  // outlives a GEMM of another shape that the device may still compute
  std::unique_ptr<CublasGemm> gemm_;
};

}  // namespace flashoverlap::cuda
