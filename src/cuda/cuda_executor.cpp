#include "cuda_executor.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "core/fail.h"
#include "gemm_choice.h"
#include "operand_check.h"

namespace flashoverlap {
namespace cuda {
namespace {

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

bool is_plain(const Epilogue& e) {
  return e.bias == nullptr && e.activation == Activation::kNone && e.residual == nullptr &&
         e.residual_out == nullptr && e.rms_norm_weight == nullptr;
}

// A plan that overlaps nothing: one group, and one transfer behind it.
bool is_serial(const OverlapPlan& plan) {
  const bool is_single = plan.groups.size() <= 1 && plan.transfers.size() <= 1;
  return is_single && plan.world_size > 1 && SerialBaseline::can_run(plan);
}

}  // namespace

// One execution, with everything that its steps need.
struct CudaExecutor::Call {
  PreparedCudaPlan& prepared;
  const Operands& operands;
  Mode mode;
  cudaStream_t stream;  // the caller's
  bool is_captured;
  EventLog& log;
  // Where the tiles that are stored in place go, and what the epilogue reads: the caller's output, or a dense
  // stand-in.
  void* output = nullptr;
  std::int64_t ldo = 0;

  [[nodiscard]] const OverlapPlan& plan() const { return prepared.plan(); }
};

CudaExecutor::CudaExecutor(std::shared_ptr<Communicator> communicator, const CudaOptions& options)
    : communicator_(std::move(communicator)), options_(options) {
  if (communicator_ == nullptr) core::fail(ErrorKind::kBadArgument, "communicator is null");
  require_device(options_.device);
  const DeviceScope scope(options_.device);
  const int all = num_sms(options_.device);
  if (options_.partition.compute == nullptr) {
    if (options_.communication_sms < 0 || options_.communication_sms >= all) {
      core::fail(ErrorKind::kBadArgument, "communication_sms is {}, must be 0 to {} on device {} with {} SMs",
                 options_.communication_sms, all - 1, options_.device, all);
    }
    if (options_.split == SmSplit::kGreen && options_.communication_sms > 0) {
      const int communication = (options_.communication_sms + kSmGroup - 1) / kSmGroup * kSmGroup;
      const int compute = splittable_sms(options_.device) - communication;
      const auto parts = split_sms(options_.device, {compute, communication});
      options_.partition = {.compute = parts[0], .communication = parts[1]};
      serial_sms_ = all;
    }
  }
  gemm_sms_ = options_.partition.compute != nullptr ? options_.partition.compute->num_sms()
                                                    : all - options_.communication_sms;
  if (serial_sms_ == 0) serial_sms_ = options_.partition.compute != nullptr ? gemm_sms_ : all;
  start_ = Event();
  gemm_done_ = Event();
  call_done_ = Event();
  void* memory = nullptr;
  FLASHOVERLAP_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(WaitError), cudaHostAllocMapped));
  wait_error_ = new (memory) WaitError{};
  load_wait_kernel();
  load_restore_kernels();
}

CudaExecutor::~CudaExecutor() {
  // The device may still work with the buffers that go now. What it waits for ends by itself or by the
  // communicator's watchdog.
  if (has_call_) {
    CudaStream stream(options_.device, CudaStream::Priority::kLow);
    try {
      const DeviceScope scope(options_.device);
      call_done_.wait_on(stream.get());
      stream.set_timeout(communicator_->timeout() + std::chrono::seconds(5));
      stream.synchronize();
    } catch (const Error&) {  // a failed call; its error was thrown, or will be by the caller's synchronize
    }
  }
  (void)cudaFreeHost(wait_error_);
}

void CudaExecutor::check_plan(const OverlapPlan& plan) const {
  if (const Verdict verdict = verify(plan); !verdict) {
    core::fail(ErrorKind::kBadArgument, "the plan of {} on rank {} does not hold: {}", plan.operation,
               plan.rank, verdict.reason);
  }
  if (plan.rank != communicator_->rank() || plan.world_size != communicator_->size()) {
    core::fail(ErrorKind::kBadArgument, "the plan is for rank {} of {}, the communicator has rank {} of {}",
               plan.rank, plan.world_size, communicator_->rank(), communicator_->size());
  }
  if (!plan.gates.empty()) {
    core::fail(ErrorKind::kUnsupported, "the GPU executor has no gates yet; the plan of {} has {}",
               plan.operation, plan.gates.size());
  }
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    const Transfer& transfer = plan.transfers[i];
    if (transfer.kind == TransferKind::kPut || transfer.trigger.kind == TriggerKind::kSlice) {
      core::fail(
          ErrorKind::kUnsupported, "the GPU executor has no {} yet; transfer {} of the plan of {} is one",
          transfer.kind == TransferKind::kPut ? "put" : "transfer set off by a slice", i, plan.operation);
    }
  }
}

std::unique_ptr<PreparedPlan> CudaExecutor::prepare(OverlapPlan plan) {
  check_plan(plan);
  const DeviceScope scope(options_.device);
  const bool as_serial = options_.serial_by_cublas && is_serial(plan);
  std::vector<const SignalGemmVariant*> variants;
  if (!as_serial) {
    variants = variants_with_tile(options_.device, plan.dtype, plan.grid.tile_m(), plan.grid.tile_n(),
                                  options_.gemm_variant);
  }
  auto prepared =
      std::make_unique<PreparedCudaPlan>(options_.device, std::move(plan), std::move(variants), as_serial);
  reserve_workspace(*prepared);
  for (const Transfer& transfer : prepared->plan().transfers) (void)channel(transfer.channel);
  (void)channel(0);
  return prepared;
}

void CudaExecutor::reserve_workspace(PreparedCudaPlan& plan) {
  const std::int64_t needed = plan.workspace_bytes();
  if (options_.workspace_limit_bytes > 0 && needed > options_.workspace_limit_bytes) {
    core::fail(ErrorKind::kOutOfMemory, "{} needs {} bytes of workspace on rank {}, the limit is {}",
               plan.plan().operation, needed, plan.plan().rank, options_.workspace_limit_bytes);
  }
  if (workspace_ == nullptr || workspace_->memory.bytes() < needed) {
    workspace_ =
        std::make_shared<Workspace>(Workspace{DeviceBuffer(options_.device, needed, plan.plan().operation)});
  }
  plan.set_workspace(workspace_);
}

std::int64_t CudaExecutor::workspace_bytes() const {
  return workspace_ == nullptr ? 0 : workspace_->memory.bytes();
}

std::optional<PlanShape> CudaExecutor::suggest(std::int64_t m, std::int64_t n, std::int64_t k,
                                               DType dtype) const {
  if (dtype == DType::kFloat32) {
    core::fail(ErrorKind::kUnsupported, "the GPU executor computes bf16 and f16, not f32");
  }
  constexpr std::int64_t kVector = 8;
  const SignalGemmVariant& variant =
      choose_variant(options_.device, dtype, m, n, k, gemm_sms_, k % kVector == 0, options_.gemm_variant);
  const std::int64_t units = std::max(1, gemm_sms_ / variant.blocks_per_tile);
  // A wave that is about square in A and B reads least.
  const double side = std::sqrt(static_cast<double>(units) * variant.tile_cols / variant.tile_rows);
  const std::int64_t tile_rows = std::max<std::int64_t>(1, (m + variant.tile_rows - 1) / variant.tile_rows);
  return PlanShape{
      .tile_m = variant.tile_rows,
      .tile_n = variant.tile_cols,
      .swizzle = std::clamp<std::int64_t>(std::llround(side), 1, tile_rows),
      .resources = {.compute_units = units, .communication_units = num_sms(options_.device) - gemm_sms_}};
}

CudaStream& CudaExecutor::channel(std::int32_t index) {
  while (channels_.size() <= as_index(index)) {
    channels_.push_back(std::make_unique<CudaStream>(options_.device, CudaStream::Priority::kHigh,
                                                     options_.partition.communication));
    channel_done_.emplace_back();
  }
  return *channels_[as_index(index)];
}

cudaStream_t CudaExecutor::gemm_stream(cudaStream_t caller) {
  if (options_.partition.compute == nullptr || options_.partition.compute->has_stream(caller)) return caller;
  if (compute_stream_ == nullptr) {
    compute_stream_ =
        std::make_unique<CudaStream>(options_.device, CudaStream::Priority::kLow, options_.partition.compute);
  }
  return compute_stream_->get();
}

void CudaExecutor::throw_if_wait_failed() {
  const auto* const code = reinterpret_cast<const volatile std::uint32_t*>(&wait_error_->code);
  if (*code == 0) return;
  core::fail(
      ErrorKind::kTimeout,
      "group {} of an earlier call on rank {} was not complete in time: {} of {} signals came (code {})",
      wait_error_->group, communicator_->rank(), wait_error_->seen, wait_error_->expected, *code);
}

void CudaExecutor::execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) {
  auto* const plan = dynamic_cast<PreparedCudaPlan*>(&prepared);
  if (plan == nullptr) core::fail(ErrorKind::kBadArgument, "the plan was prepared by another executor");
  const DeviceScope scope(options_.device);
  throw_if_wait_failed();
  if (!plan->knows(operands)) {
    check_operands(plan->plan(), operands, options_.device);
    plan->remember(operands);
  }
  auto* const stream = static_cast<cudaStream_t>(operands.stream);
  EventLog log(timeline, communicator_->rank());
  Call call{.prepared = *plan,
            .operands = operands,
            .mode = mode,
            .stream = stream,
            .is_captured = is_capturing(stream),
            .log = log};
  if (call.is_captured && timeline != nullptr) {
    core::fail(ErrorKind::kUnsupported, "{}: no timeline of a call that is captured in a CUDA graph",
               plan->plan().operation);
  }
  // Before anything is in the capture: what is half captured cannot be taken back.
  if (call.is_captured && !plan->plan().transfers.empty() && communicator_->name() != "nccl") {
    core::fail(ErrorKind::kUnsupported,
               "{}: the {} communicator cannot be captured in a CUDA graph; use NCCL", plan->plan().operation,
               communicator_->name());
  }
  try {
    enqueue(call);
  } catch (const Error& error) {
    communicator_->abort(error.what());
    throw;
  }
  log.finish(stream);
}

void CudaExecutor::enqueue(Call& call) {
  const OverlapPlan& plan = call.plan();
  // Calls share the workspace and the counters' protocol, so each waits for the one before, whatever stream
  // that was in. Inside a capture there is no event from outside it to wait for.
  if (has_call_ && !call.is_captured) call_done_.wait_on(call.stream);
  if (options_.poison_workspace && call.prepared.scratch_bytes() > 0) {
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(
        call.prepared.scratch(), 0xFF, static_cast<std::size_t>(call.prepared.scratch_bytes()), call.stream));
  }
  if (call.prepared.serial() != nullptr) {
    enqueue_serial(call);
  } else {
    const bool needs_dense = call.prepared.transfers_output() && call.operands.ldo != plan.output_cols;
    call.output = needs_dense ? call.prepared.dense_output() : call.operands.out;
    call.ldo = needs_dense ? plan.output_cols : call.operands.ldo;
    start_.record(call.stream);
    if (call.mode != Mode::kCommunicationOnly) enqueue_gemm(call);
    const bool communicates = call.mode == Mode::kRun || call.mode == Mode::kCommunicationOnly;
    if (communicates) enqueue_transfers(call);
    const bool counted =
        call.mode == Mode::kGemmOnly || (call.mode == Mode::kRun && !call.prepared.all_groups_awaited());
    if (counted && !plan.transfers.empty()) call.prepared.tables(call.operands).reset_counters(call.stream);
    if (call.mode == Mode::kRun) enqueue_restore(call);
  }
  if (!call.is_captured) {
    call_done_.record(call.stream);
    has_call_ = true;
  }
}

void CudaExecutor::enqueue_serial(Call& call) {
  // On a GPU of its own the collective takes what SMs it likes and needs no second stream; a rehearsal keeps
  // it on its partition.
  CudaStream own(options_.device, call.stream);
  const bool is_apart = options_.partition.communication != nullptr;
  call.prepared.serial()->run(
      call.operands, call.mode, call.prepared.scratch(), serial_sms_, options_.measure_serial, *communicator_,
      {.caller = call.stream, .communication = is_apart ? &channel(0) : &own}, call.log);
}

void CudaExecutor::enqueue_gemm(Call& call) {
  const OverlapPlan& plan = call.plan();
  if (plan.schedule.empty()) return;
  if (plan.grid.k() == 0) return fill_for_empty_k(call);
  const bool plain = call.mode == Mode::kPlainGemm;
  void* const output = plain ? call.prepared.plain_output() : call.output;
  const std::int64_t ldo = plain ? plan.grid.cols() : call.ldo;
  const PreparedGemm& gemm = call.prepared.gemm(call.operands, output, ldo, plain, gemm_sms_);
  const cudaStream_t stream = gemm_stream(call.stream);
  if (stream != call.stream) start_.wait_on(stream);
  call.log.begin(stream, "GEMM", fmt::format("GEMM of {} tiles", plan.schedule.size()), SpanKind::kCompute);
  gemm.launch(stream);
  call.log.end(stream);
  if (stream == call.stream) return;
  gemm_done_.record(stream);
  gemm_done_.wait_on(call.stream);
}

// The product over no columns: zeros, wherever tiles would have gone; nobody counts, so nobody may wait.
void CudaExecutor::fill_for_empty_k(Call& call) {
  const OverlapPlan& plan = call.plan();
  const auto size = static_cast<std::size_t>(size_of(plan.dtype));
  if (plan.packed_size > 0) {
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(call.prepared.packed(), 0,
                                            static_cast<std::size_t>(plan.packed_size) * size, call.stream));
  }
  if (call.prepared.writes_in_place() && call.mode != Mode::kPlainGemm) {
    FLASHOVERLAP_CUDA_CHECK(cudaMemset2DAsync(call.output, static_cast<std::size_t>(call.ldo) * size, 0,
                                              static_cast<std::size_t>(plan.output_cols) * size,
                                              static_cast<std::size_t>(plan.output_rows), call.stream));
  }
  start_.record(call.stream);  // transfers come after the zeros
}

void CudaExecutor::enqueue_transfers(Call& call) {
  const OverlapPlan& plan = call.plan();
  std::vector<bool> used(channels_.size(), false);
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    const std::size_t index = as_index(plan.transfers[i].channel);
    if (!used[index]) start_.wait_on(channels_[index]->get());
    used[index] = true;
    enqueue_transfer(call, i);
  }
  for (std::size_t index = 0; index < used.size(); ++index) {
    if (!used[index]) continue;
    channel_done_[index].record(channels_[index]->get());
    channel_done_[index].wait_on(call.stream);
  }
}

void CudaExecutor::enqueue_transfer(Call& call, std::size_t index) {
  const OverlapPlan& plan = call.plan();
  const Transfer& transfer = plan.transfers[index];
  CudaStream& stream = channel(transfer.channel);
  if (transfer.trigger.kind == TriggerKind::kGroup && call.mode == Mode::kRun) {
    wait_for_group(call, transfer.trigger.index, stream.get());
  }
  const TransferLabel label{
      .operation = plan.operation,
      .group = transfer.trigger.kind == TriggerKind::kGroup ? transfer.trigger.index : -1,
      .transfer = static_cast<std::int64_t>(index)};
  if (call.log.is_on()) {
    call.log.begin(stream.get(), fmt::format("communication {}", transfer.channel),
                   fmt::format("{} of group {}", name_of(transfer.kind), label.group),
                   SpanKind::kCommunication);
  }
  void* const from = region(call, transfer.source);
  void* const to = region(call, transfer.destination);
  const auto equal = [&](std::int64_t total) {
    return std::vector<std::int64_t>(as_index(plan.world_size), total / plan.world_size);
  };
  switch (transfer.kind) {
    case TransferKind::kAllReduce:
      communicator_->all_reduce(from, to, transfer.source.count, plan.dtype, stream, label);
      break;
    case TransferKind::kReduceScatter:
      communicator_->reduce_scatter(
          from, to, transfer.send_counts.empty() ? equal(transfer.source.count) : transfer.send_counts,
          plan.dtype, stream, label);
      break;
    case TransferKind::kAllGather:
      communicator_->all_gather(
          from, to,
          transfer.receive_counts.empty() ? equal(transfer.destination.count) : transfer.receive_counts,
          plan.dtype, stream, label);
      break;
    case TransferKind::kAllToAll:
      communicator_->all_to_all(from, transfer.send_counts, to, transfer.receive_counts, plan.dtype, stream,
                                label);
      break;
    case TransferKind::kSend:
      communicator_->send(from, transfer.source.count, plan.dtype, transfer.peer, stream, label);
      break;
    case TransferKind::kReceive:
      communicator_->receive(to, transfer.destination.count, plan.dtype, transfer.peer, stream, label);
      break;
    case TransferKind::kPut:
      core::fail(ErrorKind::kInternal, "a put passed the check of the plan");
  }
  call.log.end(stream.get());
}

void CudaExecutor::wait_for_group(const Call& call, std::int64_t group, cudaStream_t stream) {
  const DevicePlan& tables = call.prepared.tables(call.operands);
  const std::uint32_t target = tables.target(group);
  if (target == 0 || call.plan().grid.k() == 0) return;
  if (options_.wait == GroupWait::kStreamMemory) {
    return enqueue_wait_value(tables.counter(group), target, stream);
  }
  WaitParams params;
  params.counter = tables.counter(group);
  params.target = target;
  params.group = static_cast<std::uint32_t>(group);
  params.error = wait_error_;
  params.timeout_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(communicator_->timeout()).count());
  launch_wait_kernel(params, stream);
}

void* CudaExecutor::region(const Call& call, const Region& region) const {
  const std::int64_t bytes = region.offset * size_of(call.plan().dtype);
  switch (region.buffer) {
    case BufferKind::kPacked:
      return static_cast<char*>(call.prepared.packed()) + bytes;
    case BufferKind::kReceived:
      return static_cast<char*>(call.prepared.received()) + bytes;
    case BufferKind::kOutput:
      return static_cast<char*>(call.output) + bytes;
    case BufferKind::kInput:
    case BufferKind::kWeight:
      break;
  }
  core::fail(ErrorKind::kUnsupported, "the GPU executor has no transfers of the {} buffer yet (plan of {})",
             name_of(region.buffer), call.plan().operation);
}

void CudaExecutor::enqueue_restore(Call& call) {
  const OverlapPlan& plan = call.plan();
  const bool is_in_place = plan.restore.bands.empty();
  if (is_in_place && call.output == call.operands.out && is_plain(call.operands.epilogue)) return;
  RestoreParams params{.dtype = plan.dtype,
                       .rows = plan.output_rows,
                       .n = plan.output_cols,
                       .source = call.output,
                       .source_ld = call.ldo,
                       .restore = {},
                       .out = call.operands.out,
                       .ldo = call.operands.ldo,
                       .epilogue = call.operands.epilogue};
  if (!is_in_place) {
    params.source =
        plan.restore.source == BufferKind::kPacked ? call.prepared.packed() : call.prepared.received();
    params.restore = call.prepared.tables(call.operands).restore();
  }
  call.log.begin(call.stream, "restore", "restore and epilogue", SpanKind::kEpilogue);
  launch_restore(params, call.stream);
  call.log.end(call.stream);
}

}  // namespace cuda

int cuda_device_count() noexcept {
  try {
    return cuda::device_count();
  } catch (...) {
    return 0;
  }
}

std::vector<GpuPartition> make_rehearsal(int device, int world_size, int compute_sms, int communication_sms) {
  if (world_size < 1) core::fail(ErrorKind::kBadArgument, "world_size is {}, must be >= 1", world_size);
  std::vector<int> sizes(static_cast<std::size_t>(world_size), compute_sms);
  sizes.push_back(communication_sms);
  const auto parts = cuda::split_sms(device, sizes);
  std::vector<GpuPartition> partitions;
  for (int r = 0; r < world_size; ++r) {
    partitions.push_back({.compute = parts[static_cast<std::size_t>(r)], .communication = parts.back()});
  }
  return partitions;
}

std::unique_ptr<Stream> make_cuda_stream(const CudaOptions& options) {
  cuda::require_device(options.device);
  return std::make_unique<cuda::CudaStream>(options.device, cuda::CudaStream::Priority::kLow,
                                            options.partition.compute);
}

void* native_handle(Stream& stream) {
  return cuda::cuda_stream_of(stream, "native_handle");
}

std::unique_ptr<Executor> make_cuda_executor(std::shared_ptr<Communicator> communicator,
                                             const CudaOptions& options) {
  return std::make_unique<cuda::CudaExecutor>(std::move(communicator), options);
}

}  // namespace flashoverlap
