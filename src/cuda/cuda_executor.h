// Carries out plans on one GPU.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "consumer_log.h"
#include "counter_table.h"
#include "cuda_stream.h"
#include "device.h"
#include "event_log.h"
#include "flashoverlap/cuda_context.h"
#include "nccl_communicator.h"
#include "owned_cuda_plan.h"
#include "peer_reader.h"
#include "prepared_cuda_plan.h"
#include "put_heap.h"
#include "put_window.h"
#include "sm_partition.h"
#include "wait.h"

namespace flashoverlap::cuda {

/// Knows nothing of all-reduce: it puts into the caller's stream the signal GEMM, into one communication
/// stream per channel for each transfer a wait for its group, the communicator's call and, where it brings a
/// slice, the word that says so; joins them, and puts the restore kernel behind that.
///
/// GemmForm::kDecomposed: the GEMM in pieces, which wait for slices by events, as transfers wait for them.
/// Where the caller makes rows of A on the way (Operands::make_rows), it is asked for those of each piece in
/// front of it, in the caller's stream.
///
/// A GEMM whose transfers wait for it is enqueued before them, so one hardware queue
/// (CUDA_DEVICE_MAX_CONNECTIONS=1) is enough for a rank that has its GPU to itself. A GEMM that waits for
/// transfers (gates) is enqueued before them too, so that it starts with what is there: it leaves SMs free
/// for them.
///
/// A plan with puts has a consumer instead of transfers that wait in turn: see put_consumer.h.
class CudaExecutor final : public Executor {
 public:
  CudaExecutor(std::shared_ptr<Communicator> communicator, const CudaOptions& options);
  ~CudaExecutor() override;

  [[nodiscard]] std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) override;
  void execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) override;
  [[nodiscard]] std::shared_ptr<plan::MoeDevice> make_moe_device() const override;
  [[nodiscard]] std::int64_t workspace_bytes() const override;
  [[nodiscard]] std::optional<PlanShape> suggest(const ProductShape& product) const override;
  [[nodiscard]] bool makes_rows() const override { return true; }

 private:
  struct Call;
  struct Pieces;

  void check_plan(const OverlapPlan& plan) const;
  void check_room_for_arrivals(const OverlapPlan& plan) const;
  [[nodiscard]] int room_for_communication() const;
  [[nodiscard]] int gemm_sms_of(const OverlapPlan& plan) const;
  void check_workspace_limit(const PreparedCudaPlan& plan) const;
  void reserve_workspace(PreparedCudaPlan& plan);
  /// Whether plans have their workspace from their first call on only, see NcclBuffers.
  [[nodiscard]] bool registers_workspace() const;
  void settle_workspace(const Call& call);
  [[nodiscard]] std::optional<std::int64_t> agree_on_registered(const PreparedCudaPlan& plan);
  void throw_if_wait_failed();
  void enqueue(Call& call);
  /// After everything of a call is in the caller's stream.
  void mark_end(const Call& call);
  void give_up_call(const Call& call) noexcept;
  void wait_for_last_call() const noexcept;
  void enqueue_serial(Call& call);
  void introduce_memory(const Call& call);
  void enqueue_gemm(Call& call);
  void enqueue_decomposed(Call& call);
  [[nodiscard]] Pieces pieces_of(const Call& call);
  void enqueue_piece(Call& call, const Pieces& pieces, std::size_t piece);
  void make_rows(Call& call, std::span<const plan::RowRun> rows);
  void make_all_rows(Call& call);
  void begin_gemm(const Call& call, cudaStream_t stream);
  void end_gemm(const Call& call, cudaStream_t stream);
  void enqueue_transfers(Call& call);
  void end_channel(Call& call, std::size_t index);
  void join_transfers(const Call& call);
  void enqueue_step(Call& call, const TransferStep& step, CudaStream& stream);
  void enqueue_collective(Call& call, const Transfer& transfer, CudaStream& stream,
                          const TransferLabel& label);
  void enqueue_partial_sums(const Call& call, const Transfer& transfer, CudaStream& stream,
                            const TransferLabel& label);
  void enqueue_pair(Call& call, const TransferStep& step, CudaStream& stream, const TransferLabel& label);
  [[nodiscard]] bool meets_once(const PreparedCudaPlan& plan) const;
  void enqueue_messages(Call& call);
  const Event* readiness_of(Call& call, const Transfer& transfer, std::size_t message);
  // cuda_executor_restore.cpp
  void enqueue_restore(Call& call);
  [[nodiscard]] RestoreParams restore_params(const Call& call, const PreparedCudaPlan::RestoreRun& run) const;
  void enqueue_plain_epilogue(Call& call);
  // cuda_executor_puts.cpp
  [[nodiscard]] int consumers_of(const OverlapPlan& plan) const;
  [[nodiscard]] int consumer_blocks(const OverlapPlan& plan) const;
  [[nodiscard]] int gemm_sms_beside_consumer(const OverlapPlan& plan) const;
  [[nodiscard]] std::unique_ptr<PutHeap> make_put_heap() const;
  void check_puts(const OverlapPlan& plan) const;
  void open_window(const Call& call);
  void enqueue_puts(Call& call);
  void wait_for_puts(const Call& call);
  void announce_arrival(const Call& call, const TransferStep& step, cudaStream_t stream);
  void wait_for_group(const Call& call, std::int64_t group, cudaStream_t stream);
  void fill_for_empty_k(Call& call);
  CudaStream& channel(std::int32_t index);
  /// Of what other ranks read.
  [[nodiscard]] DeviceMemory readable_memory() const {
    return peers_ != nullptr ? peers_->readable_memory() : DeviceMemory::kStreamOrdered;
  }
  /// Whether the communicator copies between ranks without an SM.
  [[nodiscard]] bool copies_without_sms() const { return peers_ != nullptr && peers_->copies_without_sms(); }
  [[nodiscard]] std::int32_t stream_of(const OverlapPlan& plan, const TransferStep& step,
                                       std::size_t place) const;
  [[nodiscard]] void* region(const Call& call, const Region& region) const;
  [[nodiscard]] cudaStream_t gemm_stream(cudaStream_t caller);
  [[nodiscard]] std::uint64_t timeout_ns() const;

  std::shared_ptr<Communicator> communicator_;
  PeerReader* peers_ = nullptr;       // the communicator, where its ranks read each other's memory
  NcclCommunicator* nccl_ = nullptr;  // the communicator, where it is one
  CudaOptions options_;
  int gemm_sms_ = 0;
  int serial_sms_ = 0;
  std::vector<std::unique_ptr<CudaStream>> channels_;
  std::unique_ptr<CudaStream> compute_stream_;  // where the caller's stream is not on the rank's own SMs
  std::shared_ptr<Workspace> workspace_;
  std::shared_ptr<Workspace> registered_;  // of plans whose transfers move nothing else, see NcclBuffers
  std::unique_ptr<PutHeap> put_heap_;      // where ranks can put
  std::unique_ptr<PutWindow> window_;      // once a plan has puts
  std::shared_ptr<ConsumerLog> consumers_;
  std::shared_ptr<RetiredPlans> retired_ = std::make_shared<RetiredPlans>();
  Event start_;
  Event rows_made_;
  Event gemm_done_;
  std::vector<Event> channel_done_;
  std::vector<Event> message_ready_;  // by message that this rank sends, of the call that is enqueued
  // With GemmForm::kDecomposed, of the call that is enqueued.
  std::vector<Event> arrived_;     // by arrival, from 0
  std::vector<Event> group_done_;  // by group
  Event call_done_;
  bool has_call_ = false;
  CounterTable arrivals_;  // one word: see DeviceGates
  CounterTable all_open_;  // one word that is more than any gate waits for
  // Host memory that the device reads and writes.
  struct HostWords {
    WaitError error;
    std::uint32_t abort = 0;  // written here, when a call fails half enqueued; read by waiting GEMMs
  };
  HostWords* host_ = nullptr;
};

}  // namespace flashoverlap::cuda
