#include "cpu/transfer_queue.h"

#include <string>
#include <utility>

#include "core/fail.h"
#include "cpu/run_error.h"
#include "flashoverlap/symmetric_heap.h"

namespace flashoverlap::cpu {
namespace {

/// The last task of a stream. A stream that fails drops the tasks behind the failure, and so this one: then
/// whoever waits for something that would have come from the stream is told that it will not come.
class EndOfStream {
 public:
  explicit EndOfStream(std::shared_ptr<Progress> progress) : progress_(std::move(progress)) {}
  ~EndOfStream() {
    if (!reached_) progress_->fail(nullptr);
  }
  EndOfStream(const EndOfStream&) = delete;
  EndOfStream& operator=(const EndOfStream&) = delete;
  void reach() {
    reached_ = true;
    progress_->end_stream();
  }

 private:
  std::shared_ptr<Progress> progress_;
  bool reached_ = false;
};

std::int64_t group_of(const Transfer& transfer) {
  return transfer.trigger.kind == TriggerKind::kGroup ? transfer.trigger.index : -1;
}

}  // namespace

TransferQueue::TransferQueue(const Parts& parts, std::shared_ptr<Progress> progress,
                             std::vector<SpanLog>& logs)
    : parts_(parts), progress_(std::move(progress)), logs_(logs), begin_us_(logs.size()) {}

void TransferQueue::enqueue_all(std::span<HostStream* const> streams) {
  const OverlapPlan& plan = parts_.prepared.plan();
  progress_->start_streams(std::ssize(streams));
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    HostStream& stream = *streams[parts_.prepared.stream_of(index)];
    stream.enqueue([this, index] { wait_and_start(index); });
    call(index, stream);
    stream.enqueue([this, index] { finish(index); });
  }
  if (parts_.prepared.has_puts()) {
    // Fails the run when what others owe does not come: tiles and restore may wait for it.
    parts_.communicator.symmetric_heap()->await_arrivals(*streams.back(), {parts_.prepared.label()});
  }
  for (HostStream* stream : streams) {
    stream->enqueue([end = std::make_shared<EndOfStream>(progress_)] { end->reach(); });
  }
}

void TransferQueue::wait_and_start(std::int64_t index) {
  const Transfer& transfer = parts_.prepared.plan().transfers[static_cast<std::size_t>(index)];
  const std::size_t stream = parts_.prepared.stream_of(index);
  SpanLog& log = logs_[stream];
  try {
    const double begin_us = log.now_us();
    wait_for(transfer.trigger);
    log.add(SpanKind::kWait, "wait for transfer ", index, begin_us);
    if (parts_.hooks.before_transfer) parts_.hooks.before_transfer(index);
    begin_us_[stream] = log.now_us();
  } catch (const RunStopped&) {
    throw;
  } catch (...) {
    const std::string where =
        fmt::format("rank {}, transfer {} ({} of wave group {}) of {}", parts_.communicator.rank(), index,
                    name_of(transfer.kind), group_of(transfer), parts_.prepared.label());
    fail_run(*progress_, parts_.communicator, std::current_exception(), where);
    throw RunStopped{};
  }
}

void TransferQueue::finish(std::int64_t index) {
  const Transfer& transfer = parts_.prepared.plan().transfers[static_cast<std::size_t>(index)];
  const std::size_t stream = parts_.prepared.stream_of(index);
  logs_[stream].add(SpanKind::kCommunication, "transfer ", index, begin_us_[stream]);
  // A put's slice is the peer's.
  if (transfer.slice >= 0 && transfer.kind != TransferKind::kPut) progress_->mark_slice(transfer.slice);
}

void TransferQueue::wait_for(const Trigger& trigger) const {
  switch (trigger.kind) {
    case TriggerKind::kStart:
      return;
    case TriggerKind::kGroup:
      if (parts_.wait_for_groups) progress_->wait_for_group(trigger.index);
      return;
    case TriggerKind::kSlice:
      return progress_->wait_for_slice(trigger.index);
  }
}

void TransferQueue::call(std::int64_t index, Stream& stream) const {
  const OverlapPlan& plan = parts_.prepared.plan();
  const Transfer& transfer = plan.transfers[static_cast<std::size_t>(index)];
  Communicator& communicator = parts_.communicator;
  const std::byte* from = address(transfer.source);
  std::byte* to = transfer.kind == TransferKind::kPut ? nullptr : address(transfer.destination);
  const TransferLabel label{.operation = parts_.prepared.label(),
                            .group = group_of(transfer),
                            .transfer = index,
                            .slice = transfer.slice};
  switch (transfer.kind) {
    case TransferKind::kAllReduce:
      return communicator.all_reduce(from, to, transfer.source.count, plan.dtype, stream, label);
    case TransferKind::kReduceScatter:
      return communicator.reduce_scatter(from, to, counts_of(transfer.send_counts, transfer.source.count),
                                         plan.dtype, stream, label);
    case TransferKind::kAllGather:
      return communicator.all_gather(from, to, counts_of(transfer.receive_counts, transfer.destination.count),
                                     plan.dtype, stream, label);
    case TransferKind::kAllToAll:
      return communicator.all_to_all(from, transfer.send_counts, to, transfer.receive_counts, plan.dtype,
                                     stream, label);
    case TransferKind::kSend:
      return communicator.send(from, transfer.source.count, plan.dtype, transfer.peer, stream, label);
    case TransferKind::kReceive:
      return communicator.receive(to, transfer.destination.count, plan.dtype, transfer.peer, stream, label);
    case TransferKind::kPut: {
      const std::int64_t element = size_of(plan.dtype);
      return communicator.symmetric_heap()->put(
          transfer.peer, static_cast<std::int64_t>(transfer.destination.buffer),
          transfer.destination.offset * element, from, transfer.source.count * element, transfer.slice,
          stream, label);
    }
  }
  core::fail(ErrorKind::kInternal, "transfer {} of {} should have been refused", index,
             parts_.prepared.label());
}

std::byte* TransferQueue::address(const Region& region) const {
  std::byte* base = parts_.buffers[static_cast<std::size_t>(region.buffer)];
  return base + region.offset * size_of(parts_.prepared.plan().dtype);
}

std::vector<std::int64_t> TransferQueue::counts_of(const std::vector<std::int64_t>& counts,
                                                   std::int64_t total) const {
  if (!counts.empty()) return counts;
  const int ranks = parts_.communicator.size();
  return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), total / ranks);
}

}  // namespace flashoverlap::cpu
