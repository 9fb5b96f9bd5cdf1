#include "cuda_executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "check.h"
#include "core/fail.h"
#include "cuda_call.h"
#include "gemm_choice.h"
#include "moe_device.h"
#include "nccl_communicator.h"
#include "operand_check.h"
#include "registered_layout.h"

namespace flashoverlap {
namespace cuda {
namespace {

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

// Into how many strips of rows the columns that arrive of A are cut: tiles of a strip go on once it is there.
// On two H200s 1, 2, 4, 8 and 16 took 405, 391, 388, 402 and 402 us (docs/gpu-cluster.md): with few the first
// strip comes late, with many the tiles that are computed at a time share less of A and B.
constexpr std::int64_t kStripsOfBlocks = 4;

// A plan that overlaps nothing: one group, and one transfer behind it. A rank that has no message of its own
// must still take part where others have some.
bool is_serial(const OverlapPlan& plan) {
  const bool is_single = plan.groups.size() <= 1 && plan.transfers.size() <= 1 && plan.messages_per_pair == 0;
  return is_single && plan.world_size > 1 && SerialBaseline::can_run(plan);
}

// What a plan takes of the executor's PutWindow.
std::int64_t received_by_puts(const OverlapPlan& plan) {
  return has_puts(plan) ? PutWindow::kBuffers * plan.received_size * size_of(plan.dtype) : 0;
}

// An all-to-all moves a rank's own part too, and a copy within one device takes an SM even where one between
// devices takes none.
bool copies_to_itself(const OverlapPlan& plan) {
  return std::any_of(plan.transfers.begin(), plan.transfers.end(), [&](const Transfer& transfer) {
    return transfer.kind == TransferKind::kAllToAll && transfer.slice >= 0 &&
           transfer.send_counts[as_index(plan.rank)] > 0;
  });
}

}  // namespace

CudaExecutor::CudaExecutor(std::shared_ptr<Communicator> communicator, const CudaOptions& options)
    : communicator_(std::move(communicator)), options_(options) {
  if (communicator_ == nullptr) core::fail(ErrorKind::kBadArgument, "communicator is null");
  require_device(options_.device);
  peers_ = dynamic_cast<PeerReader*>(communicator_.get());
  nccl_ = dynamic_cast<NcclCommunicator*>(communicator_.get());
  if (options_.sums == SumBy::kRestore && peers_ == nullptr) {
    core::fail(
        ErrorKind::kUnsupported,
        "SumBy::kRestore copies partial sums out of the other ranks' memory, which the {} communicator "
        "cannot; use make_local_gpu_communicators or SumBy::kCommunicator",
        communicator_->name());
  }
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
  put_heap_ = make_put_heap();
  start_ = Event();
  rows_made_ = Event();
  gemm_done_ = Event();
  call_done_ = Event();
  void* memory = nullptr;
  FLASHOVERLAP_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(HostWords), cudaHostAllocMapped));
  host_ = new (memory) HostWords{};
  arrivals_ = CounterTable(options_.device, 1);
  all_open_ = CounterTable(options_.device, 1);
  constexpr std::uint32_t kOpen = UINT32_MAX;
  upload(options_.device, all_open_.data(), &kOpen, sizeof kOpen);
  consumers_ = std::make_shared<ConsumerLog>(options_.device);
  load_wait_kernel();
  load_restore_kernels();
}

CudaExecutor::~CudaExecutor() {
  // The device may still work with the buffers that go now.
  wait_for_last_call();
  (void)cudaFreeHost(host_);
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
}

// Of a plan's launches beside communication.
int CudaExecutor::gemm_sms_of(const OverlapPlan& plan) const {
  constexpr int kSmsOfOwnCopy = 2;
  if (has_puts(plan)) return gemm_sms_beside_consumer(plan);
  const bool has_room = room_for_communication() > 0;
  return has_room || !copies_to_itself(plan) ? gemm_sms_ : std::max(1, gemm_sms_ - kSmsOfOwnCopy);
}

int CudaExecutor::room_for_communication() const {
  return options_.partition.communication != nullptr ? options_.partition.communication->num_sms()
                                                     : num_sms(options_.device) - gemm_sms_;
}

// A GEMM that waits for what others send must leave SMs to who receives it, or it would wait for ever. The
// copy engine needs none, nor does a stream's own write of the word that counts arrivals.
void CudaExecutor::check_room_for_arrivals(const OverlapPlan& plan) const {
  const int room = room_for_communication();
  if (room < 1) {
    if (copies_without_sms() && options_.wait == GroupWait::kStreamMemory) return;
    core::fail(ErrorKind::kUnsupported,
               "{} waits for slices while it computes, and so needs SMs left to communication; "
               "communication_sms is 0 (which the local communicator with PeerCopy::kCopyEngine and "
               "GroupWait::kStreamMemory does with)",
               plan.operation);
  }
  if (nccl_ == nullptr || (nccl_->max_ctas() > 0 && nccl_->max_ctas() <= room)) return;
  core::fail(
      ErrorKind::kUnsupported,
      "{} waits for slices while it computes, so each of NCCL's blocks needs an SM that the GEMM leaves "
      "free: max_ctas of the communicator is {} ({}), must be 1 to {}, the SMs left to communication",
      plan.operation, nccl_->max_ctas(), nccl_->max_ctas() == 0 ? "NCCL's choice" : "too many", room);
}

std::unique_ptr<PreparedPlan> CudaExecutor::prepare(OverlapPlan plan) {
  check_plan(plan);
  if (has_puts(plan)) check_puts(plan);
  const DeviceScope scope(options_.device);
  const bool as_serial = options_.serial_by_cublas && is_serial(plan);
  std::vector<const SignalGemmVariant*> variants;
  if (!as_serial) {
    variants = variants_with_tile(options_.device, plan.dtype, plan.grid.tile_m(), plan.grid.tile_n(),
                                  options_.gemm_variant);
  }
  retired_->drop_finished();
  const int sms = gemm_sms_of(plan);
  auto prepared = std::make_unique<PreparedCudaPlan>(options_.device, std::move(plan), std::move(variants),
                                                     as_serial, options_.sums, options_.form, sms);
  if (prepared->is_gated() && !prepared->is_decomposed()) check_room_for_arrivals(prepared->plan());
  check_workspace_limit(*prepared);
  if (!registers_workspace()) reserve_workspace(*prepared);
  for (std::size_t i = 0; i < prepared->steps().size(); ++i)
    (void)channel(stream_of(prepared->plan(), prepared->steps()[i], i));
  (void)channel(0);
  const std::vector<TransferStep>& steps = prepared->steps();
  if (meets_once(*prepared) && prepared->sends_results()) {
    (void)channel(steps.front().channel + 1);
    message_ready_.resize(std::max(message_ready_.size(), steps.size()));
  }
  if (prepared->is_decomposed()) {
    arrived_.resize(std::max<std::size_t>(arrived_.size(), steps.empty() ? 0 : steps.back().arrivals));
    group_done_.resize(std::max(group_done_.size(), prepared->plan().groups.size()));
  }
  return std::make_unique<OwnedCudaPlan>(std::move(prepared), retired_);
}

void CudaExecutor::check_workspace_limit(const PreparedCudaPlan& plan) const {
  const std::int64_t needed = plan.workspace_bytes() + received_by_puts(plan.plan());
  if (options_.workspace_limit_bytes > 0 && needed > options_.workspace_limit_bytes) {
    core::fail(ErrorKind::kOutOfMemory, "{} needs {} bytes of workspace on rank {}, the limit is {}",
               plan.plan().operation, needed, plan.plan().rank, options_.workspace_limit_bytes);
  }
}

void CudaExecutor::reserve_workspace(PreparedCudaPlan& plan) {
  const std::int64_t needed = plan.workspace_bytes();
  if (workspace_ == nullptr || workspace_->bytes() < needed) {
    workspace_ =
        std::make_shared<Workspace>(options_.device, needed, plan.plan().operation, readable_memory());
  }
  plan.set_workspace(workspace_);
}

bool CudaExecutor::registers_workspace() const {
  return nccl_ != nullptr && nccl_->buffers() != NcclBuffers::kPlain;
}

// Of a plan that has none yet, or one that its ranks have not agreed on. That waits for its first call, since
// all ranks make that together, or it fails as any call does that a rank does not make.
void CudaExecutor::settle_workspace(const Call& call) {
  PreparedCudaPlan& plan = call.prepared;
  if (!registers_workspace() || plan.has_settled_workspace()) return;
  if (call.mode == Mode::kGemmOnly || call.mode == Mode::kPlainGemm) {  // this rank's own affair
    if (!plan.has_workspace()) reserve_workspace(plan);
    return;
  }
  if (call.is_captured) {
    core::fail(ErrorKind::kUnsupported,
               "{}: the first call of a plan cannot be captured in a CUDA graph with registered NCCL buffers",
               plan.plan().operation);
  }
  if (const std::optional<std::int64_t> bytes = agree_on_registered(plan)) {
    nccl_->reserve(registered_, *bytes, plan.plan().operation);
    plan.set_workspace(registered_);
  } else if (!plan.has_workspace()) {
    reserve_workspace(plan);
  }
  plan.mark_workspace_settled();
}

// The bytes of the rank whose plan takes most, where the plans of all ranks can have registered memory. Else
// none has, because both ends of a message must be registered, or neither. A plan of a single group sums in
// the caller's output, and which plans do is each rank's own affair where ranks have different rows.
std::optional<std::int64_t> CudaExecutor::agree_on_registered(const PreparedCudaPlan& plan) {
  struct Answer {
    std::uint64_t layout;
    std::int64_t bytes;
  };
  const Answer own{plan.serial() != nullptr ? 0 : registered_layout(plan.plan()), plan.workspace_bytes()};
  const TransferLabel label{.operation = plan.plan().operation};
  std::int64_t most = 0;
  for (const std::string& bytes :
       communicator_->exchange(std::string(reinterpret_cast<const char*>(&own), sizeof own), label)) {
    Answer answer{};
    std::memcpy(&answer, bytes.data(), std::min(bytes.size(), sizeof answer));
    if (answer.layout == 0 || answer.layout != own.layout) return std::nullopt;
    most = std::max(most, answer.bytes);
  }
  return most;
}

std::shared_ptr<plan::MoeDevice> CudaExecutor::make_moe_device() const {
  const int most_consumers = put_heap_ == nullptr ? 0 : num_sms(options_.device) / 2;
  return std::make_shared<MoeCudaDevice>(MoeCudaDevice::Options{.device = options_.device,
                                                                .memory = readable_memory(),
                                                                .num_sms = serial_sms_,
                                                                .most_consumers = most_consumers,
                                                                .consumers = consumers_,
                                                                .gemm_variant = options_.gemm_variant,
                                                                .partition = options_.partition.compute});
}

std::int64_t CudaExecutor::workspace_bytes() const {
  const auto bytes_of = [](const auto& workspace) { return workspace == nullptr ? 0 : workspace->bytes(); };
  return bytes_of(workspace_) + bytes_of(registered_) + bytes_of(window_);
}

std::optional<PlanShape> CudaExecutor::suggest(const ProductShape& product) const {
  if (product.dtype == DType::kFloat32) {
    core::fail(ErrorKind::kUnsupported, "the GPU executor computes bf16 and f16, not f32");
  }
  constexpr std::int64_t kVector = 8;
  const bool has_blocks = product.block_columns > 0;
  const std::int64_t row_columns = std::gcd(product.k, product.block_columns);
  const SignalGemmVariant& variant =
      choose_variant(options_.device, product.dtype, product.m, product.n, product.k, gemm_sms_,
                     row_columns % kVector == 0, options_.gemm_variant);
  const std::int64_t units = std::max(1, gemm_sms_ / variant.blocks_per_tile);
  // A wave that is about square in A and B reads least.
  const double side = std::sqrt(static_cast<double>(units) * variant.tile_cols / variant.tile_rows);
  const std::int64_t tile_rows =
      std::max<std::int64_t>(1, (product.m + variant.tile_rows - 1) / variant.tile_rows);
  return PlanShape{
      .tile_m = variant.tile_rows,
      .tile_n = variant.tile_cols,
      .swizzle = std::clamp<std::int64_t>(std::llround(side), 1, tile_rows),
      .resources = {.compute_units = units, .communication_units = num_sms(options_.device) - gemm_sms_},
      .slice_parts = has_blocks ? kStripsOfBlocks : 0};
}

// The channel's stream; or, where nothing of a collective but its sum takes an SM, one of two in turn, so
// that one group is added up while the next one travels. Their order in the channel is kept where they are
// issued.
std::int32_t CudaExecutor::stream_of(const OverlapPlan& plan, const TransferStep& step,
                                     std::size_t place) const {
  const bool is_after_group =
      step.collective >= 0 && plan.transfers[as_index(step.collective)].trigger.kind == TriggerKind::kGroup;
  if (!is_after_group || !copies_without_sms()) return step.channel;
  return 2 * step.channel + static_cast<std::int32_t>(place % 2);
}

CudaStream& CudaExecutor::channel(std::int32_t index) {
  while (channels_.size() <= as_index(index)) {
    channels_.push_back(std::make_unique<CudaStream>(options_.device, CudaStream::Priority::kHigh,
                                                     options_.partition.communication));
    channel_done_.emplace_back();
  }
  return *channels_[as_index(index)];
}

void CudaExecutor::throw_if_wait_failed() {
  const WaitError& error = host_->error;
  const std::uint32_t code = *static_cast<const volatile std::uint32_t*>(&error.code);
  if (code == 0) return;
  constexpr std::uint32_t kFirstOfGates = 3;
  if (code >= kFirstOfGates && code < kSegmentTimeout) {
    core::fail(ErrorKind::kTimeout,
               "slice {} (in order of arrival) of an earlier call on rank {} did not come in time: {} of {} "
               "had arrived (code {})",
               error.group, communicator_->rank(), error.seen, error.expected, code);
  }
  if (code == kPutsTimeout || code == kPutsAborted) {
    core::fail(
        ErrorKind::kTimeout,
        "rank {} did not put its results in time for an earlier call on rank {}: {} of {} segments were "
        "there (code {})",
        error.group, communicator_->rank(), error.seen, error.expected, code);
  }
  if (code == kSegmentTimeout || code == kSegmentAborted) {
    core::fail(
        ErrorKind::kTimeout,
        "segment {} of an earlier call on rank {} was not complete in time, and so was not put: {} of {} "
        "signals came (code {})",
        error.group, communicator_->rank(), error.seen, error.expected, code);
  }
  core::fail(
      ErrorKind::kTimeout,
      "group {} of an earlier call on rank {} was not complete in time: {} of {} signals came (code {})",
      error.group, communicator_->rank(), error.seen, error.expected, code);
}

void CudaExecutor::execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) {
  auto* const owned = dynamic_cast<OwnedCudaPlan*>(&prepared);
  if (owned == nullptr) core::fail(ErrorKind::kBadArgument, "the plan was prepared by another executor");
  PreparedCudaPlan* const plan = &owned->get();
  const DeviceScope scope(options_.device);
  throw_if_wait_failed();
  if (!plan->knows(operands)) {
    check_operands(plan->plan(), operands, options_.device);
    plan->remember(operands);
  }
  if (operands.make_rows && plan->transfers_input()) {
    core::fail(
        ErrorKind::kUnsupported,
        "make_rows is given, but a travels between ranks, so it must be complete at the call ({}, rank "
        "{})",
        plan->plan().operation, communicator_->rank());
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
  if (call.is_captured && plan->has_puts()) {
    core::fail(ErrorKind::kUnsupported,
               "{}: puts cannot be captured in a CUDA graph, since receive buffers take turns from call to "
               "call; use transport 'collective'",
               plan->plan().operation);
  }
  settle_workspace(call);
  call.puts = plan->has_puts() && call.communicates();
  if (call.puts) open_window(call);
  try {
    enqueue(call);
  } catch (const std::exception& error) {
    give_up_call(call);
    communicator_->abort(error.what());
    wait_for_last_call();
    throw;
  } catch (...) {
    give_up_call(call);
    wait_for_last_call();
    throw;
  }
  log.finish(stream);
}

// After a call that could not be enqueued as a whole. A GEMM that is in the stream already may wait for
// slices that nobody will send now; and what is in the streams uses what the caller and the executor may
// destroy next.
void CudaExecutor::give_up_call(const Call& call) noexcept {
  *static_cast<volatile std::uint32_t*>(&host_->abort) = 1;
  if (call.is_captured) return;
  try {
    if (compute_stream_ != nullptr) {
      gemm_done_.record(compute_stream_->get());
      gemm_done_.wait_on(call.stream);
    }
    for (std::size_t i = 0; i < channels_.size(); ++i) {
      channel_done_[i].record(channels_[i]->get());
      channel_done_[i].wait_on(call.stream);
    }
    mark_end(call);
  } catch (const Error&) {  // the device itself has failed
  }
}

// What the device waits for ends by itself or by the communicator's watchdog.
void CudaExecutor::wait_for_last_call() const noexcept {
  if (!has_call_) return;
  try {
    const DeviceScope scope(options_.device);
    CudaStream stream(options_.device, CudaStream::Priority::kLow);
    call_done_.wait_on(stream.get());
    stream.set_timeout(communicator_->timeout() + std::chrono::seconds(5));
    stream.synchronize();
  } catch (const Error&) {  // a failed call; its error was thrown, or will be by the caller's synchronize
  }
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
    if (call.mode != Mode::kCommunicationOnly) make_all_rows(call);
    enqueue_serial(call);
  } else {
    const bool needs_dense = call.prepared.transfers_output() && call.operands.ldo != plan.output_cols;
    call.output = needs_dense ? call.prepared.dense_output() : call.operands.out;
    call.ldo = needs_dense ? plan.output_cols : call.operands.ldo;
    call.is_gated = call.mode == Mode::kRun && call.prepared.is_gated();
    call.is_decomposed = call.mode == Mode::kRun && call.prepared.is_decomposed() && plan.grid.k() > 0;
    if (call.is_gated && !call.is_decomposed) {
      FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(arrivals_.data(), 0, sizeof(std::uint32_t), call.stream));
    }
    if (call.mode == Mode::kRun && peers_ != nullptr) introduce_memory(call);
    start_.record(call.stream);
    const bool transfers_first = call.prepared.waits_for_all();
    if (call.communicates() && transfers_first) {
      enqueue_transfers(call);
      join_transfers(call);
      start_.record(call.stream);
    }
    if (call.is_decomposed) {
      enqueue_decomposed(call);
    } else if (call.mode != Mode::kCommunicationOnly) {
      enqueue_gemm(call);
    }
    if (call.communicates() && !transfers_first) {
      if (!call.is_decomposed) enqueue_transfers(call);
      join_transfers(call);
    }
    const bool is_run = call.mode == Mode::kRun && !call.is_decomposed;
    const bool counted = call.mode == Mode::kGemmOnly || (is_run && !call.prepared.all_groups_awaited());
    if (counted && call.prepared.any_group_awaited())
      call.prepared.tables(call.operands).reset_counters(call.stream);
    if (call.mode == Mode::kRun) enqueue_restore(call);
    if (call.mode == Mode::kPlainGemm) enqueue_plain_epilogue(call);
    if (call.puts) {
      window_->end_call(call.prepared.puts()->table(), options_.poison_workspace, call.stream);
      consumers_->end_call(call.stream);
    }
  }
  if (!call.is_captured) mark_end(call);
}

void CudaExecutor::mark_end(const Call& call) {
  call_done_.record(call.stream);
  has_call_ = true;
  call.prepared.mark_use(call.stream);
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

// What other ranks read while a GEMM, here or there, waits for it. Not whether this rank has gates decides,
// but what travels, which is the same on all ranks.
void CudaExecutor::introduce_memory(const Call& call) {
  const TransferLabel label{.operation = call.plan().operation};
  if (call.prepared.transfers_input()) peers_->introduce(call.operands.a, label);
  if (call.prepared.transfers_weight()) peers_->introduce(call.operands.b, label);
  if (call.prepared.sends_results()) peers_->introduce(call.prepared.packed(), label);
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
