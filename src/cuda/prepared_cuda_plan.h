// A plan with everything that the GPU executor derives from it.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrivals.h"
#include "device_plan.h"
#include "flashoverlap/cuda_context.h"
#include "flashoverlap/executor.h"
#include "launches.h"
#include "put_window.h"
#include "serial_baseline.h"

namespace flashoverlap::cuda {

/// Scratch memory of one executor. Its calls follow one another on the device, so they share it. A plan keeps
/// the block that it was prepared with, so a graph captured from it stays good when a later plan makes the
/// executor take a larger one.
using Workspace = const DeviceBuffer;

/// One for each launch.
using PreparedGemms = std::vector<std::unique_ptr<PreparedGemm>>;

class PreparedCudaPlan {
 public:
  /// `sums`: who adds up partial sums. `form`: of the GEMM in Mode::kRun.
  PreparedCudaPlan(int device, OverlapPlan plan, std::vector<const SignalGemmVariant*> variants,
                   bool as_serial, SumBy sums, GemmForm form, int gemm_sms);

  [[nodiscard]] const OverlapPlan& plan() const { return plan_; }
  /// Of launches beside communication.
  [[nodiscard]] int gemm_sms() const { return gemm_sms_; }
  /// Bytes of workspace: packed and received buffer, the other ranks' partial sums where they are added here,
  /// for an output with gaps between its rows one without, and the sums of tiles that are begun.
  [[nodiscard]] std::int64_t workspace_bytes() const;
  void set_workspace(std::shared_ptr<Workspace> workspace) {
    replaced_ = std::exchange(workspace_, std::move(workspace));
  }
  [[nodiscard]] bool has_workspace() const { return workspace_ != nullptr; }
  /// Whether it is the one that the plan keeps.
  [[nodiscard]] bool has_settled_workspace() const { return is_workspace_settled_; }
  void mark_workspace_settled() { is_workspace_settled_ = true; }

  /// Whether results travel by puts. Such a plan is never decomposed.
  [[nodiscard]] bool has_puts() const { return has_puts_; }
  /// Null until its first call, or without puts.
  [[nodiscard]] const DevicePuts* puts() const { return puts_.get(); }
  void set_puts(std::unique_ptr<DevicePuts> puts) { puts_ = std::move(puts); }

  [[nodiscard]] SerialBaseline* serial() const { return serial_.get(); }
  /// For the variant that computes on these matrices.
  [[nodiscard]] const DevicePlan& tables(const Operands& operands) const;
  /// What a tile adds to its group's counter.
  [[nodiscard]] std::uint32_t signals_per_tile(const Operands& operands) const {
    return static_cast<std::uint32_t>(tables_of(variant_for(operands)).signals);
  }
  /// Whether a group is waited for by a transfer; the counters of the others are cleared after the call.
  [[nodiscard]] bool all_groups_awaited() const { return all_groups_awaited_; }
  /// Whether any is: else tiles are not counted.
  [[nodiscard]] bool any_group_awaited() const { return any_group_awaited_; }
  /// Whether any tile is stored in the output itself.
  [[nodiscard]] bool writes_in_place() const { return writes_in_place_; }
  /// Whether A, or B, travels. If so, then on every rank.
  [[nodiscard]] bool transfers_input() const { return transfers_input_; }
  [[nodiscard]] bool transfers_weight() const { return transfers_weight_; }
  [[nodiscard]] bool transfers_output() const { return transfers_output_; }
  /// Whether what the GEMM stores is the output as it is, of no other rank and for none.
  [[nodiscard]] bool product_is_output() const;
  /// Whether ranks send each other parts of the product, one by one. If so, then all of them.
  [[nodiscard]] bool sends_results() const {
    return plan_.messages_per_pair > 0 && !transfers_input_ && !transfers_weight_;
  }

  /// All rows of the output in order, cut where the restore's bands begin and end.
  struct RestoreRun {
    plan::RowRun rows;
    bool has_bands = false;  ///< Else the rows are where tiles, or transfers, have written them.
  };
  [[nodiscard]] const std::vector<RestoreRun>& restore_runs() const { return restore_runs_; }

  [[nodiscard]] void* packed() const;
  [[nodiscard]] void* received() const;
  /// Whether the restore kernel adds up what all ranks have at the same place of their packed buffers.
  [[nodiscard]] bool sums_in_restore() const { return sums_in_restore_; }
  /// Where `rank`'s packed buffer is copied to, as far as it is needed; this rank's own is `packed`.
  [[nodiscard]] void* packed_of(std::int32_t rank) const;
  /// A dense [output rows, n] matrix, for a call whose output is not dense but travels.
  [[nodiscard]] void* dense_output() const;
  /// What tiles that are begun have computed so far, see BlockInput.
  [[nodiscard]] void* begun_sums() const;
  [[nodiscard]] void* scratch() const { return workspace_->data(); }
  [[nodiscard]] std::int64_t scratch_bytes() const { return workspace_->bytes(); }

  /// The calls to the communicator, in the order in which they are issued.
  [[nodiscard]] const std::vector<TransferStep>& steps() const { return steps_; }
  /// Whether they are all sends and receives of one channel, and there are some. If so, then on every rank.
  [[nodiscard]] bool has_messages_only() const { return has_messages_only_; }
  /// Whether tiles wait on the device for slices.
  [[nodiscard]] bool is_gated() const { return !plan_.gates.empty() && !waits_for_all_; }
  /// Whether the whole GEMM waits for all transfers.
  [[nodiscard]] bool waits_for_all() const { return waits_for_all_; }
  /// Whether the GEMM itself applies this epilogue to its tiles.
  [[nodiscard]] bool fuses_epilogue(const Epilogue& epilogue) const;

  /// Whether a call's GEMM is cut where slices arrive and leave. Behind all transfers it need not be.
  [[nodiscard]] bool is_decomposed() const {
    return form_ == GemmForm::kDecomposed && serial_ == nullptr && !waits_for_all_;
  }
  /// The launches of a GEMM that is cut so.
  [[nodiscard]] const std::vector<LaunchRange>& launches(Cut cut) const {
    return launches_[static_cast<std::size_t>(cut)];
  }
  /// The rows of A that each of them needs and none before it; see rows_of_launches.
  const std::vector<std::vector<plan::RowRun>>& rows_of(Cut cut);

  /// How a GEMM differs from others on the same matrices.
  enum class Launch {
    kRun,
    kGated,      ///< Tiles wait, at their start or at their end.
    kPlain,      ///< Tiles in place, not counted.
    kDecomposed  ///< Tiles not counted; their gates are open.
  };
  struct GemmCall {
    void* output = nullptr;
    std::int64_t ldo = 0;
    Launch launch = Launch::kRun;
    Cut cut = Cut::kNowhere;
    int num_sms = 0;
    bool is_captured =
        false;          ///< By a CUDA graph, which needs the launch's memory as long as the plan lives.
    DeviceGates gates;  ///< Of tiles that wait, or would; the table is filled in here.
  };
  /// The GEMM for these matrices, in `launches(call.cut)`; made on their first use, then kept.
  const PreparedGemms& gemm(const Operands& operands, const GemmCall& call);
  /// Whether these matrices have been seen, so that they need no check again.
  [[nodiscard]] bool knows(const Operands& operands) const;
  void remember(const Operands& operands);
  /// [m, n] scratch for Mode::kPlainGemm, taken on first use.
  void* plain_output();

  /// After everything of a call is in `stream`.
  void mark_use(cudaStream_t stream) { used_.record(stream); }
  /// Whether the device still works with the tables. Not Event::has_come, which throws where the device
  /// failed.
  [[nodiscard]] bool is_in_use() const noexcept { return cudaEventQuery(used_.get()) == cudaErrorNotReady; }

 private:
  struct Key {
    const void* a = nullptr;
    const void* b = nullptr;
    const void* output = nullptr;
    const void* workspace = nullptr;
    std::int64_t lda = 0, ldb = 0, ldo = 0;
    Launch launch = Launch::kRun;
    Cut cut = Cut::kNowhere;
    Epilogue epilogue;
    bool operator==(const Key& other) const;
  };
  struct Entry {
    Key key;
    PreparedGemms gemms;
    bool is_captured = false;
  };
  /// What launches read that depends on the variant.
  struct VariantTables {
    int signals = 0;         ///< Of a tile.
    std::int64_t begun = 0;  ///< See SignalGemmArguments.
    std::unique_ptr<DevicePlan> plan;
    DeviceBuffer start;  ///< GateTables::start
  };
  void make_tables(const GateTables& gates);
  [[nodiscard]] std::int64_t begun_tiles(const SignalGemmVariant& variant, const GateTables& gates) const;
  [[nodiscard]] const VariantTables& tables_of(const SignalGemmVariant& variant) const;
  [[nodiscard]] const SignalGemmVariant& variant_for(const Operands& operands) const;
  [[nodiscard]] std::vector<OperandBlock> blocks_of(const Operands& operands) const;
  [[nodiscard]] std::int64_t received_bytes() const;
  [[nodiscard]] std::int64_t dense_bytes() const;
  [[nodiscard]] std::int64_t begun_bytes() const;
  [[nodiscard]] SignalGemmArguments arguments_of(const Operands& operands, const GemmCall& call) const;
  [[nodiscard]] PreparedGemms prepare_gemms(const Operands& operands, const Epilogue& epilogue,
                                            const GemmCall& call) const;
  void add_gates(DeviceGates gates, const VariantTables& tables, SignalGemmArguments& arguments) const;

  int device_;
  int gemm_sms_;
  bool has_puts_;
  GemmForm form_;
  OverlapPlan plan_;
  std::vector<const SignalGemmVariant*> variants_;
  /// Of each of the variants.
  std::vector<std::pair<const SignalGemmVariant*, std::shared_ptr<VariantTables>>> tables_;
  std::vector<TransferStep> steps_;
  // GateTables on the device, but for `start`.
  DeviceBuffer finish_;
  DeviceBuffer added_;
  std::unique_ptr<SerialBaseline> serial_;
  static constexpr std::size_t kCuts = 3;
  std::array<std::vector<LaunchRange>, kCuts> launches_;               // by Cut
  std::array<std::vector<std::vector<plan::RowRun>>, kCuts> rows_of_;  // the same; made where they are needed
  std::vector<RestoreRun> restore_runs_;
  std::unique_ptr<DevicePuts> puts_;
  std::shared_ptr<Workspace> workspace_;
  std::shared_ptr<Workspace> replaced_;  // the one before, with which the device may still work
  bool is_workspace_settled_ = false;
  bool writes_in_place_ = false;
  bool all_groups_awaited_ = false;
  bool any_group_awaited_ = false;
  bool transfers_output_ = false;
  bool transfers_input_ = false;
  bool transfers_weight_ = false;
  bool sums_in_restore_ = false;
  bool has_messages_only_ = false;
  bool waits_for_all_ = false;
  bool fuses_epilogues_ = false;
  bool hides_epilogues_ = false;            // behind another tile's products
  static constexpr std::size_t kKept = 16;  // launches, or operands
  std::vector<Entry> gemms_;
  std::vector<Operands> known_;
  std::size_t next_known_ = 0;
  DeviceBuffer plain_output_;
  Event used_;
};

}  // namespace flashoverlap::cuda
