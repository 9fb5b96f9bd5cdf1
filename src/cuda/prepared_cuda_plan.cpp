#include "prepared_cuda_plan.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "core/fail.h"
#include "operand_check.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::int64_t kAlignment = 1024;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

bool is_same(const Operands& x, const Operands& y) {
  const Epilogue& e = x.epilogue;
  const Epilogue& f = y.epilogue;
  return x.a == y.a && x.lda == y.lda && x.b == y.b && x.ldb == y.ldb && x.out == y.out && x.ldo == y.ldo &&
         e.bias == f.bias && e.residual == f.residual && e.residual_ld == f.residual_ld &&
         e.residual_out == f.residual_out && e.residual_out_ld == f.residual_out_ld &&
         e.rms_norm_weight == f.rms_norm_weight;
}

// Partial sums of the packed buffer that leave their sum where they were, and are restored from there.
bool adds_in_packed_buffer(const OverlapPlan& plan) {
  const auto is_sum = [](const Transfer& transfer) {
    return (transfer.kind == TransferKind::kAllReduce || transfer.kind == TransferKind::kReduceScatter) &&
           transfer.source.buffer == BufferKind::kPacked;
  };
  // A rank that keeps no row restores nothing, but what the others do it does too.
  const bool is_restored = !plan.restore.bands.empty() || plan.output_rows * plan.output_cols == 0;
  return !plan.transfers.empty() && is_restored && plan.restore.source == BufferKind::kPacked &&
         std::all_of(plan.transfers.begin(), plan.transfers.end(), is_sum);
}

bool is_messages_from_the_start(const OverlapPlan& plan, const std::vector<TransferStep>& steps) {
  const auto waits_for_nothing = [&](const TransferStep& step) {
    return step.collective < 0 && step.channel == steps.front().channel &&
           (step.send < 0 ||
            plan.transfers[static_cast<std::size_t>(step.send)].trigger.kind == TriggerKind::kStart);
  };
  return !steps.empty() && std::all_of(steps.begin(), steps.end(), waits_for_nothing);
}

bool has_tile_in_place(const OverlapPlan& plan) {
  for (std::int64_t tile = 0; tile < plan.grid.num_tiles(); ++tile) {
    if (plan.placement.of_tile(tile).empty()) return true;
  }
  return false;
}

template <class T>
DeviceBuffer upload_gates(int device, const std::vector<T>& table) {
  const std::size_t bytes = table.size() * sizeof(T);
  DeviceBuffer buffer(device, static_cast<std::int64_t>(bytes), "the table of gates");
  upload(device, buffer.data(), table.data(), bytes);
  return buffer;
}

}  // namespace

PreparedCudaPlan::PreparedCudaPlan(int device, OverlapPlan plan,
                                   std::vector<const SignalGemmVariant*> variants, bool as_serial, SumBy sums)
    : device_(device),
      plan_(std::move(plan)),
      variants_(std::move(variants)),
      sums_in_restore_(!as_serial && sums == SumBy::kRestore && adds_in_packed_buffer(plan_)) {
  std::set<std::int64_t> awaited;
  for (const Transfer& transfer : plan_.transfers) {
    if (transfer.trigger.kind == TriggerKind::kGroup) awaited.insert(transfer.trigger.index);
  }
  transfers_output_ = is_moved(plan_, BufferKind::kOutput);
  transfers_input_ = is_moved(plan_, BufferKind::kInput);
  transfers_weight_ = is_moved(plan_, BufferKind::kWeight);
  writes_in_place_ = has_tile_in_place(plan_);
  any_group_awaited_ = !awaited.empty();
  all_groups_awaited_ = awaited.size() == plan_.groups.size();
  if (as_serial) {
    serial_ = std::make_unique<SerialBaseline>(device, plan_);
  } else {
    steps_ = transfer_steps(plan_);
    has_messages_only_ = !sends_results() && is_messages_from_the_start(plan_, steps_);
    const GateTables gates = gate_tables(plan_, steps_);
    start_ = upload_gates(device, gates.start);
    finish_ = upload_gates(device, gates.finish);
    added_ = upload_gates(device, gates.added);
    for (const SignalGemmVariant* variant : variants_) {
      variant->load();
      const auto has_signals = [&](const auto& entry) { return entry.first == variant->signals_per_tile; };
      if (std::any_of(tables_.begin(), tables_.end(), has_signals)) continue;
      tables_.emplace_back(variant->signals_per_tile, std::make_unique<DevicePlan>(device, plan_, *variant));
    }
  }
}

std::int64_t PreparedCudaPlan::workspace_bytes() const {
  const std::int64_t size = size_of(plan_.dtype);
  if (serial_ != nullptr) return aligned(serial_->scratch_size() * size);
  const std::int64_t dense = transfers_output_ ? aligned(plan_.output_rows * plan_.output_cols * size) : 0;
  const std::int64_t packed_buffers = sums_in_restore_ ? plan_.world_size : 1;
  return aligned(plan_.packed_size * size) * packed_buffers + aligned(plan_.received_size * size) + dense;
}

void* PreparedCudaPlan::packed() const {
  return workspace_->data();
}

void* PreparedCudaPlan::received() const {
  return static_cast<char*>(workspace_->data()) + aligned(plan_.packed_size * size_of(plan_.dtype));
}

void* PreparedCudaPlan::dense_output() const {
  return static_cast<char*>(received()) + aligned(plan_.received_size * size_of(plan_.dtype));
}

// Behind the other buffers, which a plan that adds in the packed buffer does not have.
void* PreparedCudaPlan::packed_of(std::int32_t rank) const {
  if (rank == plan_.rank) return packed();
  const std::int64_t place = rank < plan_.rank ? rank + 1 : rank;
  return static_cast<char*>(workspace_->data()) + aligned(plan_.packed_size * size_of(plan_.dtype)) * place;
}

void* PreparedCudaPlan::plain_output() {
  const std::int64_t bytes = plan_.grid.rows() * plan_.grid.cols() * size_of(plan_.dtype);
  if (plain_output_.bytes() < bytes)
    plain_output_ = DeviceBuffer(device_, bytes, "the output of the plain GEMM");
  return plain_output_.data();
}

const SignalGemmVariant& PreparedCudaPlan::variant_for(const Operands& operands) const {
  const auto is_multiple = [](const void* pointer, std::int64_t ld, std::int64_t elements) {
    return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(elements * 2) == 0 &&
           ld % elements == 0;
  };
  for (const SignalGemmVariant* variant : variants_) {
    if (is_multiple(operands.a, operands.lda, variant->operand_alignment) &&
        is_multiple(operands.b, operands.ldb, variant->operand_alignment)) {
      return *variant;
    }
  }
  core::fail(ErrorKind::kBadArgument,
             "{}: a at {} with lda {}, b at {} with ldb {}: addresses and leading dimensions must be "
             "multiples of {} elements for "
             "the GEMM with tiles of {}x{} ({})",
             plan_.operation, operands.a, operands.lda, operands.b, operands.ldb,
             variants_.front()->operand_alignment, plan_.grid.tile_m(), plan_.grid.tile_n(),
             variants_.front()->name);
}

const DevicePlan& PreparedCudaPlan::tables(const Operands& operands) const {
  // Without columns to sum over nothing is read of the matrices, and any variant's tables will do.
  if (plan_.grid.k() == 0) return *tables_.front().second;
  const int signals = variant_for(operands).signals_per_tile;
  return *std::find_if(tables_.begin(), tables_.end(), [&](const auto& entry) {
            return entry.first == signals;
          })->second;
}

const PreparedGemm& PreparedCudaPlan::gemm(const Operands& operands, void* output, std::int64_t ldo,
                                           Launch launch, int num_sms, DeviceGates gates) {
  const bool plain = launch == Launch::kPlain;
  const Key key{operands.a, operands.b, output, scratch(), operands.lda, operands.ldb, ldo, launch};
  const auto found =
      std::find_if(launches_.begin(), launches_.end(), [&](const Entry& entry) { return entry.key == key; });
  if (found != launches_.end()) return *found->gemm;
  SignalGemmArguments arguments;
  arguments.m = static_cast<int>(plan_.grid.rows());
  arguments.n = static_cast<int>(plan_.grid.cols());
  arguments.k = static_cast<int>(plan_.grid.k());
  arguments.a = operands.a;
  arguments.lda = operands.lda;
  arguments.b = operands.b;
  for (const Problem& problem : plan_.grid.problems())
    arguments.num_weights = std::max(arguments.num_weights, static_cast<int>(problem.weight) + 1);
  arguments.ldb = operands.ldb;
  arguments.packed = plain || plan_.packed_size == 0 ? nullptr : packed();
  arguments.packed_size = plain ? 0 : plan_.packed_size;
  arguments.output = plain || writes_in_place() ? output : nullptr;
  arguments.ldd = ldo;
  if (!plain) {
    arguments.output_rows = static_cast<int>(plan_.output_rows);
    arguments.output_cols = static_cast<int>(plan_.output_cols);
  }
  const SignalGemmVariant& variant = variant_for(operands);
  const DevicePlan& device_plan = tables(operands);
  arguments.tables = plain ? device_plan.plain_tables() : device_plan.tables();
  // Where no transfer follows a group nobody waits, and nobody would set the counters back.
  arguments.counters = plain || !any_group_awaited_ ? nullptr : device_plan.counters();
  if (launch == Launch::kGated) add_gates(gates, arguments);
  arguments.num_sms = num_sms;
  Entry entry{key, variant.prepare(arguments)};
  if (launches_.size() < kKept) {
    launches_.push_back(std::move(entry));
    return *launches_.back().gemm;
  }
  Entry& oldest = launches_[next_launch_++ % kKept];
  oldest = std::move(entry);
  return *oldest.gemm;
}

void PreparedCudaPlan::add_gates(DeviceGates gates, SignalGemmArguments& arguments) const {
  const DeviceBuffer& needed = finish_.bytes() > 0 ? finish_ : start_;
  gates.needed = static_cast<const std::uint32_t*>(needed.data());
  if (finish_.bytes() == 0) {
    arguments.gates = gates;
    return;
  }
  arguments.finish = {.gates = gates,
                      .received = received(),
                      .offsets = static_cast<const std::int64_t*>(added_.data()),
                      .others = plan_.world_size - 1,
                      .lower = plan_.rank};
}

bool PreparedCudaPlan::knows(const Operands& operands) const {
  return std::any_of(known_.begin(), known_.end(),
                     [&](const Operands& known) { return is_same(known, operands); });
}

void PreparedCudaPlan::remember(const Operands& operands) {
  if (known_.size() < kKept) {
    known_.push_back(operands);
  } else {
    known_[next_known_++ % kKept] = operands;
  }
}

}  // namespace flashoverlap::cuda
