#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/prepared_plan.h"
#include "cpu/progress.h"
#include "cpu/span_log.h"
#include "flashoverlap/executor.h"
#include "flashoverlap/host_stream.h"

namespace flashoverlap::cpu {

/// Addresses of the buffers that regions speak of, by BufferKind.
using BufferTable = std::array<std::byte*, 5>;

/// Puts the transfers of a run into the streams of their channels: for each, a task that waits for its
/// trigger, the communicator's call, and a task that marks the slice that came. The same sequence that a GPU
/// executor has.
class TransferQueue {
 public:
  struct Parts {
    const CpuPreparedPlan& prepared;
    Communicator& communicator;
    const ExecutorHooks& hooks;
    BufferTable buffers;
    bool wait_for_groups;  ///< false: transfers that wait for groups start at once (to measure them alone).
  };

  /// `logs`: one per channel of the plan. All of it, this object too, must live until the streams have been
  /// synchronised.
  TransferQueue(const Parts& parts, std::shared_ptr<Progress> progress, std::vector<SpanLog>& logs);

  /// streams: by CpuPreparedPlan::stream_of; for a plan with puts the last one waits for those of others.
  /// When a stream fails before its end, `progress` is told to stop the run. May throw what the
  /// communicator's calls throw.
  void enqueue_all(std::span<HostStream* const> streams);

 private:
  void wait_and_start(std::int64_t index);
  void finish(std::int64_t index);
  void wait_for(const Trigger& trigger) const;
  void call(std::int64_t index, Stream& stream) const;
  [[nodiscard]] std::byte* address(const Region& region) const;
  [[nodiscard]] std::vector<std::int64_t> counts_of(const std::vector<std::int64_t>& counts,
                                                    std::int64_t total) const;

  Parts parts_;
  std::shared_ptr<Progress> progress_;
  std::vector<SpanLog>& logs_;
  std::vector<double> begin_us_;  // of each stream's transfer in flight; used by that stream only
};

}  // namespace flashoverlap::cpu
