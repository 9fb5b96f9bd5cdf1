// The communication streams of a call: what they wait for, the communicator's calls, what they announce.
#include "core/fail.h"
#include "cuda_call.h"

namespace flashoverlap::cuda {
namespace {

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

std::vector<std::int64_t> equal_counts(const OverlapPlan& plan, std::int64_t total) {
  return std::vector<std::int64_t>(as_index(plan.world_size), total / plan.world_size);
}

}  // namespace

void CudaExecutor::enqueue_transfers(Call& call) {
  if (call.puts) return enqueue_puts(call);
  if (meets_once(call.prepared)) return enqueue_messages(call);
  std::vector<bool> used(channels_.size(), false);
  const std::vector<TransferStep>& steps = call.prepared.steps();
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::size_t index = as_index(stream_of(call.plan(), steps[i], i));
    if (!used[index]) start_.wait_on(channels_[index]->get());
    used[index] = true;
    enqueue_step(call, steps[i], *channels_[index]);
  }
  for (std::size_t index = 0; index < used.size(); ++index)
    if (used[index]) end_channel(call, index);
}

void CudaExecutor::end_channel(Call& call, std::size_t index) {
  channel_done_[index].record(channels_[index]->get());
  call.channels.push_back(index);
}

void CudaExecutor::join_transfers(const Call& call) {
  for (const std::size_t index : call.channels) channel_done_[index].wait_on(call.stream);
}

// Between ranks of one process; else those messages of a call that wait for nothing, where copies take no SM.
bool CudaExecutor::meets_once(const PreparedCudaPlan& plan) const {
  if (peers_ == nullptr || !plan.has_messages_only()) return false;
  return peers_->is_one_process() || (copies_without_sms() && !plan.sends_results());
}

// All in one meeting of the ranks, which takes the host longer than a copy takes the device.
void CudaExecutor::enqueue_messages(Call& call) {
  const OverlapPlan& plan = call.plan();
  const std::vector<TransferStep>& steps = call.prepared.steps();
  const std::int32_t index = steps.front().channel;
  CudaStream& stream = channel(index);
  std::vector<PeerMessage> sends, receives;
  std::vector<const TransferStep*> brought_by;
  for (const TransferStep& step : steps) {
    if (step.send >= 0) {
      const Transfer& transfer = plan.transfers[as_index(step.send)];
      sends.push_back({transfer.peer, region(call, transfer.source), transfer.source.count,
                       readiness_of(call, transfer, sends.size())});
    }
    if (step.receive >= 0) {
      const Transfer& transfer = plan.transfers[as_index(step.receive)];
      receives.push_back({transfer.peer, region(call, transfer.destination), transfer.destination.count});
      brought_by.push_back(&step);
    }
  }
  const auto slice_of = [&](std::size_t i) { return plan.transfers[as_index(brought_by[i]->receive)].slice; };
  TransferLabel label{.operation = plan.operation};
  if (!brought_by.empty()) label.slice = slice_of(0);
  start_.wait_on(stream.get());
  peers_->exchange_messages(sends, receives, plan.dtype, stream, label,
                            {.begins =
                                 [&](std::size_t i) {
                                   call.log.begin(stream.get(), fmt::format("communication {}", index),
                                                  slice_of(i) >= 0
                                                      ? fmt::format("receive of slice {}", slice_of(i))
                                                      : fmt::format("receive of message {}", i),
                                                  SpanKind::kCommunication);
                                 },
                             .arrived =
                                 [&](std::size_t i) {
                                   call.log.end(stream.get());
                                   announce_arrival(call, *brought_by[i], stream.get());
                                 }});
  end_channel(call, as_index(index));
}

// Where a message follows a group: the event that comes once the group is complete, in a stream of its own,
// so that no copy waits for it but the one that brings the message.
const Event* CudaExecutor::readiness_of(Call& call, const Transfer& transfer, std::size_t message) {
  if (transfer.trigger.kind != TriggerKind::kGroup || call.mode != Mode::kRun) return nullptr;
  const std::size_t index = as_index(transfer.channel + 1);
  CudaStream& stream = channel(transfer.channel + 1);
  if (call.channels.empty()) {
    start_.wait_on(stream.get());
    call.channels.push_back(index);
  }
  wait_for_group(call, transfer.trigger.index, stream.get());
  message_ready_[message].record(stream.get());
  channel_done_[index].record(stream.get());
  return &message_ready_[message];
}

void CudaExecutor::enqueue_step(Call& call, const TransferStep& step, CudaStream& stream) {
  const OverlapPlan& plan = call.plan();
  const bool is_pair = step.collective < 0;
  // What is waited for, and what is named: the send's group, the receive's slice.
  const std::int64_t sends = is_pair ? step.send : step.collective;
  const std::int64_t receives = is_pair ? step.receive : step.collective;
  TransferLabel label{.operation = plan.operation, .transfer = receives >= 0 ? receives : sends};
  if (sends >= 0 && plan.transfers[as_index(sends)].trigger.kind == TriggerKind::kGroup) {
    label.group = plan.transfers[as_index(sends)].trigger.index;
    if (call.mode == Mode::kRun) wait_for_group(call, label.group, stream.get());
  }
  if (receives >= 0) label.slice = plan.transfers[as_index(receives)].slice;
  if (call.log.is_on()) {
    const std::string_view kind =
        is_pair ? "send and receive" : name_of(plan.transfers[as_index(sends)].kind);
    const std::string what =
        label.slice >= 0 ? fmt::format("slice {}", label.slice) : fmt::format("group {}", label.group);
    call.log.begin(stream.get(), fmt::format("communication {}", step.channel),
                   fmt::format("{} of {}", kind, what), SpanKind::kCommunication);
  }
  if (is_pair) {
    enqueue_pair(call, step, stream, label);
  } else {
    enqueue_collective(call, plan.transfers[as_index(step.collective)], stream, label);
  }
  call.log.end(stream.get());
  announce_arrival(call, step, stream.get());
}

void CudaExecutor::enqueue_collective(Call& call, const Transfer& transfer, CudaStream& stream,
                                      const TransferLabel& label) {
  const OverlapPlan& plan = call.plan();
  if (call.prepared.sums_in_restore()) return enqueue_partial_sums(call, transfer, stream, label);
  void* const from = region(call, transfer.source);
  void* const to = region(call, transfer.destination);
  switch (transfer.kind) {
    case TransferKind::kAllReduce:
      return communicator_->all_reduce(from, to, transfer.source.count, plan.dtype, stream, label);
    case TransferKind::kReduceScatter:
      return communicator_->reduce_scatter(
          from, to,
          transfer.send_counts.empty() ? equal_counts(plan, transfer.source.count) : transfer.send_counts,
          plan.dtype, stream, label);
    case TransferKind::kAllGather:
      return communicator_->all_gather(from, to,
                                       transfer.receive_counts.empty()
                                           ? equal_counts(plan, transfer.destination.count)
                                           : transfer.receive_counts,
                                       plan.dtype, stream, label);
    case TransferKind::kAllToAll:
      return communicator_->all_to_all(from, transfer.send_counts, to, transfer.receive_counts, plan.dtype,
                                       stream, label);
    case TransferKind::kSend:
    case TransferKind::kReceive:
    case TransferKind::kPut:
      core::fail(ErrorKind::kInternal, "a {} among the collectives of the plan of {}", name_of(transfer.kind),
                 plan.operation);
  }
}

// Instead of a reduction: what this rank keeps of the sum, it reads of all others.
void CudaExecutor::enqueue_partial_sums(const Call& call, const Transfer& transfer, CudaStream& stream,
                                        const TransferLabel& label) {
  const OverlapPlan& plan = call.plan();
  const std::int64_t first_byte = transfer.destination.offset * size_of(plan.dtype);
  std::vector<void*> to;
  for (std::int32_t r = 0; r < plan.world_size; ++r)
    to.push_back(static_cast<char*>(call.prepared.packed_of(r)) + first_byte);
  peers_->read_peers(region(call, transfer.source), transfer.source.count,
                     transfer.destination.offset - transfer.source.offset, transfer.destination.count, to,
                     plan.dtype, stream, label);
}

// A send and a receive in one call: an all-to-all in which all other messages are empty.
void CudaExecutor::enqueue_pair(Call& call, const TransferStep& step, CudaStream& stream,
                                const TransferLabel& label) {
  const OverlapPlan& plan = call.plan();
  std::vector<std::int64_t> send_counts(as_index(plan.world_size), 0);
  std::vector<std::int64_t> receive_counts(as_index(plan.world_size), 0);
  void* from = nullptr;
  void* to = nullptr;
  if (step.send >= 0) {
    const Transfer& transfer = plan.transfers[as_index(step.send)];
    from = region(call, transfer.source);
    send_counts[as_index(transfer.peer)] = transfer.source.count;
  }
  if (step.receive >= 0) {
    const Transfer& transfer = plan.transfers[as_index(step.receive)];
    to = region(call, transfer.destination);
    receive_counts[as_index(transfer.peer)] = transfer.destination.count;
  }
  communicator_->all_to_all(from, send_counts, to, receive_counts, plan.dtype, stream, label);
}

void CudaExecutor::announce_arrival(const Call& call, const TransferStep& step, cudaStream_t stream) {
  if (!call.is_gated || !step.brings_slice) return;
  if (call.is_decomposed) return arrived_[step.arrivals - 1].record(stream);
  if (options_.wait == GroupWait::kStreamMemory) {
    return enqueue_write_value(arrivals_.data(), step.arrivals, stream);
  }
  launch_write_kernel(arrivals_.data(), step.arrivals, stream);
}

std::uint64_t CudaExecutor::timeout_ns() const {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(communicator_->timeout()).count());
}

void CudaExecutor::wait_for_group(const Call& call, std::int64_t group, cudaStream_t stream) {
  const DevicePlan& tables = call.prepared.tables(call.operands);
  const std::uint32_t target = tables.target(group);
  if (target == 0 || call.plan().grid.k() == 0) return;
  if (call.is_decomposed) return group_done_[as_index(group)].wait_on(stream);
  if (options_.wait == GroupWait::kStreamMemory) {
    return enqueue_wait_value(tables.counter(group), target, stream);
  }
  WaitParams params;
  params.counter = tables.counter(group);
  params.target = target;
  params.group = static_cast<std::uint32_t>(group);
  params.error = &host_->error;
  params.timeout_ns = timeout_ns();
  launch_wait_kernel(params, stream);
}

void* CudaExecutor::region(const Call& call, const Region& region) const {
  const std::int64_t bytes = region.offset * size_of(call.plan().dtype);
  const auto at = [bytes](const void* base) {
    // Slices of A and B land in the caller's matrices, see the operators that say so.
    return static_cast<char*>(const_cast<void*>(base)) + bytes;
  };
  switch (region.buffer) {
    case BufferKind::kPacked:
      return at(call.prepared.packed());
    case BufferKind::kReceived:
      return at(call.prepared.received());
    case BufferKind::kOutput:
      return at(call.output);
    case BufferKind::kInput:
      return at(call.operands.a);
    case BufferKind::kWeight:
      return at(call.operands.b);
  }
  core::fail(ErrorKind::kInternal, "a buffer that does not exist in the plan of {}", call.plan().operation);
}

}  // namespace flashoverlap::cuda
