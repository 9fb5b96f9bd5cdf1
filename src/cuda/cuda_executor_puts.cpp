// Plans whose results travel by puts: the consumer beside the GEMM, and the wait for what others put here.
#include <algorithm>

#include "core/fail.h"
#include "cuda_call.h"
#include "nvshmem_heap.h"
#include "put_window.h"

namespace flashoverlap::cuda {

// Null where ranks cannot write into each other's memory.
std::unique_ptr<PutHeap> CudaExecutor::make_put_heap() const {
  if (options_.put_memory == PutMemory::kNvshmem) {
    return std::make_unique<NvshmemHeap>(*communicator_, options_.device, options_.put_memory_bytes,
                                         peers_ == nullptr ? LinkModel{} : peers_->link());
  }
  if (peers_ == nullptr) return nullptr;
  return std::make_unique<PeerHeap>(options_.device, *peers_);
}

int CudaExecutor::consumers_of(const OverlapPlan& plan) const {
  const auto wanted = std::max<std::int64_t>(1, plan.resources.communication_units);
  return static_cast<int>(std::min<std::int64_t>(wanted, num_sms(options_.device)));
}

// On an SM each that the GEMM leaves free; or, where ranks share the SMs for communication, no more than
// leave half of the room there to others: blocks that find none would end every put late.
int CudaExecutor::consumer_blocks(const OverlapPlan& plan) const {
  const int consumers = consumers_of(plan);
  if (options_.partition.communication == nullptr) return consumers;
  const int fit = options_.partition.communication->num_sms() * kConsumersPerSm / 2 / window_->ranks_here();
  return std::clamp(consumers, 1, std::max(1, fit));
}

// SMs of a GEMM beside a consumer: the rank's partition has none of the consumer's.
int CudaExecutor::gemm_sms_beside_consumer(const OverlapPlan& plan) const {
  if (options_.partition.compute != nullptr) return gemm_sms_;
  return std::max(1, num_sms(options_.device) - consumers_of(plan));
}

void CudaExecutor::check_puts(const OverlapPlan& plan) const {
  if (put_heap_ == nullptr) {
    core::fail(ErrorKind::kUnsupported,
               "{} puts results into the other ranks' memory, which the {} communicator cannot; use "
               "make_local_gpu_communicators or PutMemory::kNvshmem",
               plan.operation, communicator_->name());
  }
  static_cast<void>(make_put_table(plan, false, {}));
}

// Before a call of a plan with puts: where they go. Its first call is the same on all ranks, so they open
// their windows then; where addresses expire, in every call.
void CudaExecutor::open_window(const Call& call) {
  PreparedCudaPlan& plan = call.prepared;
  if (window_ == nullptr) window_ = std::make_unique<PutWindow>(options_.device, *communicator_, *put_heap_);
  const bool is_new = plan.puts() == nullptr;
  if (is_new) {
    plan.set_puts(std::make_unique<DevicePuts>(
        options_.device, make_put_table(plan.plan(), window_->shares_device(), put_heap_->link())));
  }
  if (!is_new && !put_heap_->expires()) return;
  try {
    window_->open(plan.plan().received_size * size_of(plan.plan().dtype),
                  {.operation = plan.plan().operation});
  } catch (const Error& error) {  // ranks have windows of different sizes, so the others may have had room
    communicator_->abort(error.what());
    throw;
  }
}

void CudaExecutor::enqueue_puts(Call& call) {
  const DevicePuts& puts = *call.prepared.puts();
  const bool waits = call.mode == Mode::kRun && call.plan().grid.k() > 0;
  ConsumerParams consumer{.puts = puts.puts(),
                          .num_puts = static_cast<std::int32_t>(puts.table().puts.size()),
                          .packed = static_cast<const char*>(call.prepared.packed()),
                          .counters = waits ? call.prepared.tables(call.operands).counters() : nullptr,
                          .signals_per_tile = waits ? call.prepared.signals_per_tile(call.operands) : 1,
                          .done = puts.done(),
                          .times = consumers_->now(),
                          .error = &host_->error,
                          .abort = &host_->abort,
                          .timeout_ns = timeout_ns()};
  window_->fill(consumer);
  const cudaStream_t stream = channel(0).get();
  start_.wait_on(stream);
  call.log.begin(stream, "communication 0", fmt::format("{} puts", consumer.num_puts),
                 SpanKind::kCommunication);
  launch_wait_for_first_segment(consumer, stream);
  launch_consumer(consumer, consumer_blocks(call.plan()), stream);
  call.log.end(stream);
  if (consumer.times != nullptr) launch_pace_begin(&consumer.times->producer_end_ns, call.stream);
  channel_done_[0].record(stream);
  channel_done_[0].wait_on(call.stream);
  if (waits) call.prepared.tables(call.operands).reset_counters(call.stream);
  wait_for_puts(call);
}

void CudaExecutor::wait_for_puts(const Call& call) {
  WaitForPutsParams params{.error = &host_->error, .abort = &host_->abort, .timeout_ns = timeout_ns()};
  window_->fill(params, call.prepared.puts()->table());
  call.log.begin(call.stream, "arrivals", "wait for other ranks' puts", SpanKind::kWait);
  launch_wait_for_puts(params, call.stream);
  call.log.end(call.stream);
}

}  // namespace flashoverlap::cuda
