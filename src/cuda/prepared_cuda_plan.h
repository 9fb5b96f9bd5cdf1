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
#include "serial_baseline.h"

namespace flashoverlap::cuda {

/// Scratch memory of one executor. Its calls follow one another on the device, so they share it. A plan keeps
/// the block that it was prepared with, so a graph captured from it stays good when a later plan makes the
/// executor take a larger one.
using Workspace = const DeviceBuffer;

class PreparedCudaPlan {
 public:
  /// `sums`: who adds up partial sums.
  PreparedCudaPlan(int device, OverlapPlan plan, std::vector<const SignalGemmVariant*> variants,
                   bool as_serial, SumBy sums);

  [[nodiscard]] const OverlapPlan& plan() const { return plan_; }
  /// Bytes of workspace: packed and received buffer, the other ranks' partial sums where they are added here
  /// and, for an output with gaps between its rows, one without.
  [[nodiscard]] std::int64_t workspace_bytes() const;
  void set_workspace(std::shared_ptr<Workspace> workspace) {
    replaced_ = std::exchange(workspace_, std::move(workspace));
  }
  [[nodiscard]] bool has_workspace() const { return workspace_ != nullptr; }
  /// Whether it is the one that the plan keeps.
  [[nodiscard]] bool has_settled_workspace() const { return is_workspace_settled_; }
  void mark_workspace_settled() { is_workspace_settled_ = true; }

  [[nodiscard]] SerialBaseline* serial() const { return serial_.get(); }
  /// For the variant that computes on these matrices.
  [[nodiscard]] const DevicePlan& tables(const Operands& operands) const;
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
  /// Whether ranks send each other parts of the product, one by one. If so, then all of them.
  [[nodiscard]] bool sends_results() const {
    return plan_.messages_per_pair > 0 && !transfers_input_ && !transfers_weight_;
  }

  [[nodiscard]] void* packed() const;
  [[nodiscard]] void* received() const;
  /// Whether the restore kernel adds up what all ranks have at the same place of their packed buffers.
  [[nodiscard]] bool sums_in_restore() const { return sums_in_restore_; }
  /// Where `rank`'s packed buffer is copied to, as far as it is needed; this rank's own is `packed`.
  [[nodiscard]] void* packed_of(std::int32_t rank) const;
  /// A dense [output rows, n] matrix, for a call whose output is not dense but travels.
  [[nodiscard]] void* dense_output() const;
  [[nodiscard]] void* scratch() const { return workspace_->data(); }
  [[nodiscard]] std::int64_t scratch_bytes() const { return workspace_->bytes(); }

  /// The calls to the communicator, in the order in which they are issued.
  [[nodiscard]] const std::vector<TransferStep>& steps() const { return steps_; }
  /// Whether they are all sends and receives of one channel that wait for nothing, and there are some. If so,
  /// then on every rank.
  [[nodiscard]] bool has_messages_only() const { return has_messages_only_; }
  [[nodiscard]] bool has_gates() const { return !plan_.gates.empty(); }

  /// How a launch differs from others on the same matrices.
  enum class Launch { kRun, kGated, kPlain };
  /// The launch for these matrices; made on their first use, then kept. kPlain: tiles in place, not counted.
  /// kGated: tiles wait, at their start or at their end, as `gates` says, whose table is filled in here.
  const PreparedGemm& gemm(const Operands& operands, void* output, std::int64_t ldo, Launch launch,
                           int num_sms, DeviceGates gates);
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
    bool operator==(const Key&) const = default;
  };
  struct Entry {
    Key key;
    std::unique_ptr<PreparedGemm> gemm;
  };
  [[nodiscard]] const SignalGemmVariant& variant_for(const Operands& operands) const;
  void add_gates(DeviceGates gates, SignalGemmArguments& arguments) const;

  int device_;
  OverlapPlan plan_;
  std::vector<const SignalGemmVariant*> variants_;
  /// By the signals of a tile, in which variants with one tile shape may differ, and which the tables hold
  /// the sums of.
  std::vector<std::pair<int, std::unique_ptr<DevicePlan>>> tables_;
  std::vector<TransferStep> steps_;
  // GateTables on the device.
  DeviceBuffer start_;
  DeviceBuffer finish_;
  DeviceBuffer added_;
  std::unique_ptr<SerialBaseline> serial_;
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
  static constexpr std::size_t kKept = 16;  // launches; the oldest makes room
  std::vector<Entry> launches_;
  std::size_t next_launch_ = 0;
  std::vector<Operands> known_;
  std::size_t next_known_ = 0;
  DeviceBuffer plain_output_;
  Event used_;
};

}  // namespace flashoverlap::cuda
