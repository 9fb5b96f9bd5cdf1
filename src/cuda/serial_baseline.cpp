#include "serial_baseline.h"

#include <algorithm>
#include <numeric>

#include "check.h"
#include "core/fail.h"
#include "cuda_stream.h"
#include "operand_check.h"
#include "plan/moe_operations.h"

namespace flashoverlap::cuda {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

// The rank that each row of D goes to, read off where its first column is placed.
std::vector<std::int32_t> destinations_of(const OverlapPlan& plan, std::int64_t m) {
  struct Chunk {
    std::int64_t begin;
    std::int32_t rank;
  };
  std::vector<Chunk> chunks;
  for (const Transfer& transfer : plan.transfers) {
    std::int64_t offset = transfer.source.offset;
    for (std::int32_t r = 0; r < plan.world_size; ++r) {
      chunks.push_back({offset, r});
      offset += transfer.send_counts.empty() ? transfer.source.count / plan.world_size
                                             : transfer.send_counts[index(r)];
    }
  }
  std::stable_sort(chunks.begin(), chunks.end(),
                   [](const Chunk& a, const Chunk& b) { return a.begin < b.begin; });
  std::vector<std::int32_t> destinations(index(m), 0);
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const Tile& tile = plan.grid.tile(t);
    if (tile.col_begin != 0) continue;
    for (const PlacementSegment& segment : plan.placement.of_tile(t)) {
      // Of several chunks that begin there, all but the last are empty.
      const auto after =
          std::upper_bound(chunks.begin(), chunks.end(), segment.offset,
                           [](std::int64_t offset, const Chunk& chunk) { return offset < chunk.begin; });
      std::fill_n(destinations.begin() + tile.row_begin + segment.row_begin, segment.rows, (after - 1)->rank);
    }
  }
  return destinations;
}

template <class T>
DeviceBuffer upload_table(int device, const std::vector<T>& host) {
  DeviceBuffer buffer(device, static_cast<std::int64_t>(host.size() * sizeof(T)),
                      "tables of the serial baseline");
  upload(device, buffer.data(), host.data(), host.size() * sizeof(T));
  return buffer;
}

// One all-gather into A or B, and then the product.
bool is_gather_first(const OverlapPlan& plan) {
  if (plan.transfers.size() != 1) return false;
  const Transfer& transfer = plan.transfers.front();
  const BufferKind buffer = transfer.destination.buffer;
  return transfer.kind == TransferKind::kAllGather && transfer.trigger.kind == TriggerKind::kStart &&
         (buffer == BufferKind::kInput || buffer == BufferKind::kWeight) && plan.placement.segments.empty();
}

const void* at(const void* base, std::int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * size_of(dtype);
}

}  // namespace

Verdict SerialBaseline::can_run(const OverlapPlan& plan) {
  if (is_gather_first(plan)) return {};
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.kind != plan.transfers.front().kind)
      return core::no("the plan has transfers of several kinds");
    if (transfer.trigger.kind != TriggerKind::kGroup)
      return core::no("a transfer of the plan does not follow a group");
  }
  if (!plan.gates.empty()) return core::no("the plan has gates");
  const auto has_own_weight = [](const Problem& problem) { return problem.weight != 0; };
  if (std::ranges::any_of(plan.grid.problems(), has_own_weight))
    return core::no("the plan multiplies with several weights");
  // A rank with one expert has one weight, but what it sends must lie as that of ranks with several does.
  if (plan::is_of_experts(plan)) return core::no("the plan is of a layer of experts");
  if (plan.transfers.empty()) return {};
  const TransferKind kind = plan.transfers.front().kind;
  if (kind != TransferKind::kAllReduce && kind != TransferKind::kReduceScatter &&
      kind != TransferKind::kAllToAll) {
    return core::no("no serial counterpart of {}", name_of(kind));
  }
  if (kind == TransferKind::kAllToAll && is_moved(plan, BufferKind::kOutput))
    return core::no("an all-to-all of columns, which this has of rows only");
  return {};
}

SerialBaseline::SerialBaseline(int device, const OverlapPlan& plan)
    : device_(device), plan_(plan), m_(plan.grid.rows()) {
  if (const Verdict verdict = can_run(plan); !verdict) {
    core::fail(ErrorKind::kUnsupported, "serial baseline of {}: {}", plan.operation, verdict.reason);
  }
  if (plan.transfers.empty()) return;
  kind_ = plan.transfers.front().kind;
  if (kind_ == TransferKind::kAllReduce) return;
  if (kind_ == TransferKind::kAllGather) {
    receive_counts_ = plan.transfers.front().receive_counts;
    return;
  }
  const std::vector<std::int32_t> destinations = destinations_of(plan, m_);
  send_counts_.assign(index(plan.world_size), 0);
  receive_counts_.assign(index(plan.world_size), 0);
  for (const std::int32_t destination : destinations) send_counts_[index(destination)] += plan.output_cols;
  for (const Transfer& transfer : plan.transfers) {
    for (std::size_t r = 0; r < transfer.receive_counts.size(); ++r)
      receive_counts_[r] += transfer.receive_counts[r];
  }
  if (std::is_sorted(destinations.begin(), destinations.end())) return;
  order_.resize(index(m_));
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](std::int64_t a, std::int64_t b) {
    return destinations[index(a)] < destinations[index(b)];
  });
  const auto n = static_cast<std::int32_t>(plan.output_cols);
  std::vector<DeviceRow> rows;
  std::vector<DevicePiece> pieces;
  for (std::int32_t row = 0; row < m_; ++row) {
    rows.push_back({.first_piece = row, .row_in_band = 0});
    pieces.push_back({.offset = order_[index(row)] * plan.output_cols, .col_begin = 0, .cols = n});
  }
  rows_ = upload_table(device, rows);
  pieces_ = upload_table(device, pieces);
}

// D, its rows in order of destination, and what is received: the last two only where needed, but their place
// is cheap.
std::int64_t SerialBaseline::scratch_size() const {
  if (kind_ == TransferKind::kAllGather) return 0;  // the product goes straight into the output
  const std::int64_t matrix = m_ * plan_.output_cols;
  return matrix + (is_permuted() ? matrix : 0) + plan_.output_rows * plan_.output_cols;
}

void SerialBaseline::prepare_gemm(const Operands& operands, void* d, std::int64_t ldd, int num_sms,
                                  bool measure, cudaStream_t stream) {
  const CublasGemm::Shape shape{.m = m_,
                                .n = plan_.output_cols,
                                .k = plan_.grid.k(),
                                .lda = operands.lda,
                                .ldb = operands.ldb,
                                .ldd = ldd};
  if (shape.m == 0 || shape.n == 0 || shape.k == 0) return;
  if (gemm_workspace_.data() == nullptr)
    gemm_workspace_ = DeviceBuffer(device_, CublasGemm::kWorkspaceBytes, "cuBLAS");
  if (gemm_ == nullptr || gemm_->shape() != shape) {
    gemm_ = std::make_unique<CublasGemm>(device_, plan_.dtype, shape, num_sms, gemm_workspace_.data());
  }
  if (measure && !gemm_->is_measured() && !is_capturing(stream))
    gemm_->measure(operands.a, operands.b, d, stream);
}

void SerialBaseline::multiply(const Operands& operands, void* d, std::int64_t ldd,
                              cudaStream_t stream) const {
  const std::int64_t n = plan_.output_cols;
  const std::int64_t k = plan_.grid.k();
  if (m_ == 0 || n == 0) return;
  if (k == 0) {
    const auto width = static_cast<std::size_t>(n * size_of(plan_.dtype));
    FLASHOVERLAP_CUDA_CHECK(cudaMemset2DAsync(d, static_cast<std::size_t>(ldd * size_of(plan_.dtype)), 0,
                                              width, static_cast<std::size_t>(m_), stream));
    return;
  }
  gemm_->launch(operands.a, operands.b, d, stream);
}

void SerialBaseline::communicate(const void* send, void* receive, Communicator& communicator,
                                 Stream& stream) const {
  const TransferLabel label{.operation = plan_.operation, .group = 0, .transfer = 0};
  switch (kind_) {
    case TransferKind::kAllReduce:
      return communicator.all_reduce(send, receive, plan_.output_rows * plan_.output_cols, plan_.dtype,
                                     stream, label);
    case TransferKind::kReduceScatter:
      return communicator.reduce_scatter(send, receive, send_counts_, plan_.dtype, stream, label);
    default:
      return communicator.all_to_all(send, send_counts_, receive, receive_counts_, plan_.dtype, stream,
                                     label);
  }
}

// The collective in its stream, forked from the caller's and joined to it.
template <class Issue>
void SerialBaseline::enqueue_collective(const Streams& streams, EventLog& log, Issue&& issue) {
  const cudaStream_t on = cuda_stream_of(*streams.communication, "serial baseline");
  const bool forks = on != streams.caller;
  if (forks) {
    fork_.record(streams.caller);
    fork_.wait_on(on);
  }
  log.begin(on, "communication 0", std::string(name_of(kind_)), SpanKind::kCommunication);
  issue();
  log.end(on);
  if (forks) {
    join_.record(on);
    join_.wait_on(streams.caller);
  }
}

void SerialBaseline::run_gather_first(const Operands& operands, Mode mode, int num_sms, bool measure,
                                      Communicator& communicator, const Streams& streams, EventLog& log) {
  const Transfer& transfer = plan_.transfers.front();
  const bool is_input = transfer.destination.buffer == BufferKind::kInput;
  const void* const base = is_input ? operands.a : operands.b;
  if (mode == Mode::kRun || mode == Mode::kCommunicationOnly) {
    enqueue_collective(streams, log, [&] {
      communicator.all_gather(at(base, transfer.source.offset, plan_.dtype),
                              const_cast<void*>(at(base, transfer.destination.offset, plan_.dtype)),
                              receive_counts_, plan_.dtype, *streams.communication,
                              {.operation = plan_.operation, .group = -1, .transfer = 0, .slice = 0});
    });
  }
  if (mode == Mode::kCommunicationOnly) return;
  prepare_gemm(operands, operands.out, operands.ldo, num_sms, measure, streams.caller);
  log.begin(streams.caller, "GEMM", "cuBLAS", SpanKind::kCompute);
  multiply(operands, operands.out, operands.ldo, streams.caller);
  log.end(streams.caller);
  if (mode != Mode::kRun || is_plain(operands.epilogue)) return;
  launch_restore({.dtype = plan_.dtype,
                  .rows = plan_.output_rows,
                  .n = plan_.output_cols,
                  .source = operands.out,
                  .source_ld = operands.ldo,
                  .sums = {},
                  .restore = {},
                  .out = operands.out,
                  .ldo = operands.ldo,
                  .epilogue = operands.epilogue},
                 streams.caller);
}

void SerialBaseline::run(const Operands& operands, Mode mode, void* scratch, int num_sms, bool measure,
                         Communicator& communicator, const Streams& streams, EventLog& log) {
  if (kind_ == TransferKind::kAllGather) {
    return run_gather_first(operands, mode, num_sms, measure, communicator, streams, log);
  }
  const std::int64_t n = plan_.output_cols;
  const std::int64_t matrix_bytes = m_ * n * size_of(plan_.dtype);
  auto* const d_scratch = static_cast<char*>(scratch);
  char* const sorted = d_scratch + matrix_bytes;
  char* const received_scratch = sorted + (is_permuted() ? matrix_bytes : 0);
  const bool communicates = !plan_.transfers.empty();
  // With the output's rows one after the other, the collective writes there directly; an all-reduce also
  // works in place.
  void* const received = operands.ldo == n ? operands.out : received_scratch;
  void* const d = !communicates || kind_ == TransferKind::kAllReduce ? received : d_scratch;

  if (mode != Mode::kCommunicationOnly) {
    prepare_gemm(operands, d, n, num_sms, measure, streams.caller);
    log.begin(streams.caller, "GEMM", "cuBLAS", SpanKind::kCompute);
    multiply(operands, d, n, streams.caller);
    log.end(streams.caller);
  }
  if (mode == Mode::kGemmOnly || mode == Mode::kPlainGemm) return;
  const void* send = d;
  if (is_permuted()) {
    RestoreParams gather{.dtype = plan_.dtype,
                         .rows = m_,
                         .n = n,
                         .source = d,
                         .sums = {},
                         .restore = {},
                         .out = sorted,
                         .ldo = n,
                         .epilogue = {}};
    gather.restore = {.rows = static_cast<const DeviceRow*>(rows_.data()),
                      .pieces = static_cast<const DevicePiece*>(pieces_.data()),
                      .piece_cols = static_cast<std::int32_t>(n),
                      .is_aligned = n % 8 == 0};
    if (mode == Mode::kRun) launch_restore(gather, streams.caller);
    send = sorted;
  }
  if (communicates) {
    enqueue_collective(streams, log,
                       [&] { communicate(send, received, communicator, *streams.communication); });
  }
  if (mode == Mode::kCommunicationOnly || (received == operands.out && is_plain(operands.epilogue))) return;
  launch_restore({.dtype = plan_.dtype,
                  .rows = plan_.output_rows,
                  .n = n,
                  .source = received,
                  .source_ld = n,
                  .sums = {},
                  .restore = {},
                  .out = operands.out,
                  .ldo = operands.ldo,
                  .epilogue = operands.epilogue},
                 streams.caller);
}

}  // namespace flashoverlap::cuda
