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

bool is_same(const Epilogue& e, const Epilogue& f) {
  return e.bias == f.bias && e.activation == f.activation && e.residual == f.residual &&
         e.residual_ld == f.residual_ld && e.residual_out == f.residual_out &&
         e.residual_out_ld == f.residual_out_ld && e.rms_norm_weight == f.rms_norm_weight;
}

bool is_same(const Operands& x, const Operands& y) {
  return x.a == y.a && x.lda == y.lda && x.b == y.b && x.ldb == y.ldb && x.out == y.out && x.ldo == y.ldo &&
         is_same(x.epilogue, y.epilogue);
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

bool are_messages_of_one_channel(const std::vector<TransferStep>& steps) {
  return !steps.empty() && std::ranges::all_of(steps, [&](const TransferStep& step) {
    return step.collective < 0 && step.channel == steps.front().channel;
  });
}

bool has_tile_in_place(const OverlapPlan& plan) {
  for (std::int64_t tile = 0; tile < plan.grid.num_tiles(); ++tile) {
    if (plan.placement.of_tile(tile).empty()) return true;
  }
  return false;
}

std::vector<PreparedCudaPlan::RestoreRun> restore_runs_of(const OverlapPlan& plan) {
  std::vector<PreparedCudaPlan::RestoreRun> runs;
  std::int64_t end = 0;
  const auto add = [&](std::int64_t rows, bool has_bands) {
    if (rows == 0) return;
    if (!runs.empty() && runs.back().has_bands == has_bands) {
      runs.back().rows.count += rows;
    } else {
      runs.push_back({{end, rows}, has_bands});
    }
    end += rows;
  };
  for (const RestoreBand& band : plan.restore.bands) {
    add(band.row_begin - end, false);
    add(band.rows, true);
  }
  add(plan.output_rows - end, false);
  return runs;
}

template <class T>
DeviceBuffer upload_gates(int device, const std::vector<T>& table) {
  const std::size_t bytes = table.size() * sizeof(T);
  DeviceBuffer buffer(device, static_cast<std::int64_t>(bytes), "the table of gates");
  upload(device, buffer.data(), table.data(), bytes);
  return buffer;
}

// The same GEMM for some positions of the schedule alone. What a position says of the packed buffer and of
// counters it says of the whole plan's.
SignalGemmArguments part_of(SignalGemmArguments arguments, const LaunchRange& range) {
  arguments.tables.schedule += range.first;
  arguments.tables.num_positions = static_cast<std::int32_t>(range.count);
  if (arguments.gates.needed != nullptr) arguments.gates.needed += range.first * arguments.gates.per_position;
  DeviceFinish& finish = arguments.finish;
  if (finish.gates.needed != nullptr) {
    finish.gates.needed += range.first;
    finish.offsets += range.first * finish.others;
  }
  return arguments;
}

}  // namespace

PreparedCudaPlan::PreparedCudaPlan(int device, OverlapPlan plan,
                                   std::vector<const SignalGemmVariant*> variants, bool as_serial, SumBy sums,
                                   GemmForm form, int gemm_sms)
    : device_(device),
      gemm_sms_(gemm_sms),
      has_puts_(cuda::has_puts(plan)),
      form_(has_puts_ ? GemmForm::kPersistent : form),  // the consumer looks at its counters
      plan_(std::move(plan)),
      variants_(std::move(variants)),
      sums_in_restore_(!as_serial && sums == SumBy::kRestore && adds_in_packed_buffer(plan_)) {
  std::set<std::int64_t> awaited;
  for (const Transfer& transfer : plan_.transfers) {
    if (transfer.trigger.kind == TriggerKind::kGroup) awaited.insert(transfer.trigger.index);
  }
  transfers_output_ = is_moved(plan_, BufferKind::kOutput);
  // A rank without columns of A takes part in what the others do with theirs.
  transfers_input_ = is_moved(plan_, BufferKind::kInput) || plan_.input_rows > 0;
  transfers_weight_ = is_moved(plan_, BufferKind::kWeight);
  writes_in_place_ = has_tile_in_place(plan_);
  restore_runs_ = restore_runs_of(plan_);
  // The consumer waits for the last group, whatever travels: see make_put_table.
  any_group_awaited_ = !awaited.empty() || (has_puts_ && !plan_.groups.empty());
  all_groups_awaited_ = awaited.size() == plan_.groups.size();
  if (as_serial) {
    serial_ = std::make_unique<SerialBaseline>(device, plan_);
  } else {
    steps_ = transfer_steps(plan_);
    has_messages_only_ = are_messages_of_one_channel(steps_);
    make_tables(gate_tables(plan_, steps_));
  }
}

void PreparedCudaPlan::make_tables(const GateTables& gates) {
  waits_for_all_ = gates.waits_for_all;
  for (const Cut cut : {Cut::kNowhere, Cut::kGroups, Cut::kGroupsAndArrivals})
    launches_[static_cast<std::size_t>(cut)] = launch_ranges(plan_, gates, cut);
  // Pingpong kernels multiply one tile while another's epilogue is applied; in those with a walk of 0 no
  // operator's epilogue is.
  const int walk = variants_.empty() ? 0 : variants_.front()->walk;
  hides_epilogues_ = walk > 1;
  const bool has_own_kernel = is_gated() || !plan_.input_blocks.empty();
  fuses_epilogues_ =
      walk > 0 && has_own_kernel && plan_.restore.bands.empty() && !transfers_output_ && plan_.grid.k() > 0;
  finish_ = upload_gates(device_, gates.finish);
  added_ = upload_gates(device_, gates.added);
  for (const SignalGemmVariant* variant : variants_) {
    variant->load();
    const int signals = variant->signals_per_tile;
    const std::int64_t begun = begun_tiles(*variant, gates);
    const auto twin = std::ranges::find_if(tables_, [&](const auto& entry) {
      return entry.second->signals == signals && entry.second->begun == begun;
    });
    if (twin != tables_.end()) {
      const std::shared_ptr<VariantTables> same = twin->second;
      tables_.emplace_back(variant, same);
      continue;
    }
    const bool has_start = !gates.start.empty() && !waits_for_all_;
    tables_.emplace_back(
        variant,
        std::make_shared<VariantTables>(VariantTables{
            .signals = signals,
            .begun = begun,
            .plan = std::make_unique<DevicePlan>(device_, plan_, *variant, begun),
            .start = has_start ? upload_gates(device_, start_with_begun(gates, begun)) : DeviceBuffer()}));
  }
}

bool PreparedCudaPlan::product_is_output() const {
  return plan_.restore.bands.empty() && plan_.packed_size == 0 && !transfers_output_ &&
         plan_.grid.rows() == plan_.output_rows && plan_.grid.cols() == plan_.output_cols;
}

// Where it is quicker than a pass over the output behind the GEMM. Measured (docs/gpu-measurements.md): in
// pingpong kernels it always is, of fewer columns than were measured exponentials are left out; in
// cooperative kernels a bias and a residual are quicker, activations are not.
bool PreparedCudaPlan::fuses_epilogue(const Epilogue& epilogue) const {
  if (!fuses_epilogues_ || epilogue.rms_norm_weight != nullptr) return false;
  if (!hides_epilogues_) return epilogue.activation == Activation::kNone;
  constexpr std::int64_t kColumnsOfExponential = 2048;
  const bool is_cheap = epilogue.activation == Activation::kNone || epilogue.activation == Activation::kRelu;
  return is_cheap || plan_.grid.k() >= kColumnsOfExponential;
}

// What is begun costs a tile of float32 written and read again.
std::int64_t PreparedCudaPlan::begun_tiles(const SignalGemmVariant& variant, const GateTables& gates) const {
  if (variant.walk == 0 || !is_gated() || is_decomposed()) return 0;
  const std::int64_t turn = static_cast<std::int64_t>(gemm_sms_ / variant.blocks_per_tile) * variant.walk;
  return tiles_to_begin(plan_, gates, turn);
}

const PreparedCudaPlan::VariantTables& PreparedCudaPlan::tables_of(const SignalGemmVariant& variant) const {
  return *std::ranges::find(tables_, &variant, [](const auto& entry) { return entry.first; })->second;
}

// What is put is received in a PutWindow.
std::int64_t PreparedCudaPlan::received_bytes() const {
  return has_puts_ ? 0 : aligned(plan_.received_size * size_of(plan_.dtype));
}

std::int64_t PreparedCudaPlan::dense_bytes() const {
  return transfers_output_ ? aligned(plan_.output_rows * plan_.output_cols * size_of(plan_.dtype)) : 0;
}

std::int64_t PreparedCudaPlan::begun_bytes() const {
  std::int64_t most = 0;
  for (const auto& [variant, tables] : tables_) most = std::max(most, tables->begun);
  return aligned(most * plan_.grid.tile_m() * plan_.grid.tile_n() * static_cast<std::int64_t>(sizeof(float)));
}

std::int64_t PreparedCudaPlan::workspace_bytes() const {
  const std::int64_t size = size_of(plan_.dtype);
  if (serial_ != nullptr) return aligned(serial_->scratch_size() * size);
  const std::int64_t packed_buffers = sums_in_restore_ ? plan_.world_size : 1;
  return aligned(plan_.packed_size * size) * packed_buffers + received_bytes() + dense_bytes() +
         begun_bytes();
}

void* PreparedCudaPlan::packed() const {
  return workspace_->data();
}

void* PreparedCudaPlan::received() const {
  return static_cast<char*>(workspace_->data()) + aligned(plan_.packed_size * size_of(plan_.dtype));
}

void* PreparedCudaPlan::dense_output() const {
  return static_cast<char*>(received()) + received_bytes();
}

void* PreparedCudaPlan::begun_sums() const {
  return static_cast<char*>(dense_output()) + dense_bytes();
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

std::vector<OperandBlock> PreparedCudaPlan::blocks_of(const Operands& operands) const {
  std::vector<OperandBlock> blocks;
  for (const InputBlock& block : plan_.input_blocks) {
    const void* const base = block.buffer == BufferKind::kInput ? operands.a : received();
    blocks.push_back({.a = static_cast<const char*>(base) + block.offset * size_of(plan_.dtype),
                      .k_begin = static_cast<int>(block.k_begin),
                      .depth = static_cast<int>(block.depth)});
  }
  return blocks;
}

const SignalGemmVariant& PreparedCudaPlan::variant_for(const Operands& operands) const {
  SignalGemmArguments matrices;
  matrices.a = operands.a;
  matrices.lda = operands.lda;
  matrices.b = operands.b;
  matrices.ldb = operands.ldb;
  matrices.blocks = blocks_of(operands);
  for (const SignalGemmVariant* variant : variants_) {
    if (are_operands_aligned(matrices, variant->operand_alignment)) return *variant;
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
  if (plan_.grid.k() == 0) return *tables_.front().second->plan;
  return *tables_of(variant_for(operands)).plan;
}

const std::vector<std::vector<plan::RowRun>>& PreparedCudaPlan::rows_of(Cut cut) {
  std::vector<std::vector<plan::RowRun>>& rows = rows_of_[static_cast<std::size_t>(cut)];
  if (rows.empty()) rows = rows_of_launches(plan_, launches(cut));
  return rows;
}

bool PreparedCudaPlan::Key::operator==(const Key& other) const {
  return a == other.a && b == other.b && output == other.output && workspace == other.workspace &&
         lda == other.lda && ldb == other.ldb && ldo == other.ldo && launch == other.launch &&
         cut == other.cut && is_same(epilogue, other.epilogue);
}

const PreparedGemms& PreparedCudaPlan::gemm(const Operands& operands, const GemmCall& call) {
  const Epilogue epilogue =
      call.launch != Launch::kPlain && fuses_epilogue(operands.epilogue) ? operands.epilogue : Epilogue{};
  const Key key{operands.a,   operands.b, call.output, scratch(), operands.lda,
                operands.ldb, call.ldo,   call.launch, call.cut,  epilogue};
  auto found =
      std::find_if(gemms_.begin(), gemms_.end(), [&](const Entry& entry) { return entry.key == key; });
  if (found == gemms_.end()) {
    // Their descriptors may be in device memory, which graphs keep, and calls that are not done.
    if (gemms_.size() >= kKept && !is_in_use())
      std::erase_if(gemms_, [](const Entry& entry) { return !entry.is_captured; });
    gemms_.push_back({key, prepare_gemms(operands, epilogue, call)});
    found = std::prev(gemms_.end());
  }
  found->is_captured |= call.is_captured;
  return found->gemms;
}

PreparedGemms PreparedCudaPlan::prepare_gemms(const Operands& operands, const Epilogue& epilogue,
                                              const GemmCall& call) const {
  SignalGemmArguments arguments = arguments_of(operands, call);
  arguments.finish.epilogue = epilogue;
  arguments.finish.has_epilogue = !is_plain(epilogue);
  arguments.num_sms = call.num_sms;
  const SignalGemmVariant& variant = variant_for(operands);
  const bool has_gates = call.launch == Launch::kGated || (call.launch == Launch::kDecomposed && is_gated());
  if (has_gates) add_gates(call.gates, tables_of(variant), arguments);
  PreparedGemms gemms;
  for (const LaunchRange& range : launches(call.cut))
    gemms.push_back(variant.prepare(call.cut == Cut::kNowhere ? arguments : part_of(arguments, range)));
  return gemms;
}

SignalGemmArguments PreparedCudaPlan::arguments_of(const Operands& operands, const GemmCall& call) const {
  const bool plain = call.launch == Launch::kPlain;
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
  arguments.blocks = blocks_of(operands);
  arguments.packed = plain || plan_.packed_size == 0 ? nullptr : packed();
  arguments.packed_size = plain ? 0 : plan_.packed_size;
  arguments.output = plain || writes_in_place() ? call.output : nullptr;
  arguments.ldd = call.ldo;
  if (!plain) {
    arguments.output_rows = static_cast<int>(plan_.output_rows);
    arguments.output_cols = static_cast<int>(plan_.output_cols);
  }
  const VariantTables& tables = tables_of(variant_for(operands));
  arguments.tables = plain ? tables.plan->plain_tables() : tables.plan->tables();
  // Where no transfer follows a group, or by an event, nobody waits, and nobody would set the counters back.
  const bool counts = !plain && call.launch != Launch::kDecomposed && any_group_awaited_;
  arguments.counters = counts ? tables.plan->counters() : nullptr;
  if (!plain && tables.begun > 0) {
    arguments.begun = static_cast<int>(tables.begun);
    arguments.sums = begun_sums();
  }
  return arguments;
}

void PreparedCudaPlan::add_gates(DeviceGates gates, const VariantTables& tables,
                                 SignalGemmArguments& arguments) const {
  const bool at_end = finish_.bytes() > 0;
  gates.needed = static_cast<const std::uint32_t*>((at_end ? finish_ : tables.start).data());
  if (!at_end) {
    gates.per_position = std::max(1, static_cast<int>(plan_.input_blocks.size()));
    arguments.gates = gates;
    return;
  }
  arguments.finish.gates = gates;
  arguments.finish.received = received();
  arguments.finish.offsets = static_cast<const std::int64_t*>(added_.data());
  arguments.finish.others = plan_.world_size - 1;
  arguments.finish.lower = plan_.rank;
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
