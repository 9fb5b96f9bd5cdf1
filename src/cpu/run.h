#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "cpu/prepared_plan.h"
#include "cpu/progress.h"
#include "cpu/restore_pass.h"
#include "cpu/span_log.h"
#include "cpu/thread_pool.h"
#include "cpu/tile_unit.h"
#include "cpu/transfer_queue.h"
#include "cpu/workspace.h"
#include "flashoverlap/executor.h"
#include "plan/row_runs.h"

namespace flashoverlap::cpu {

/// One run of a plan: tiles on the pool and transfers on the streams at the same time, then the restore pass.
class Run {
 public:
  struct Parts {
    const CpuPreparedPlan& prepared;
    const Operands& operands;
    Mode mode;
    Communicator& communicator;
    const ExecutorHooks& hooks;
    const Workspace& workspace;
    bool staged;  ///< The output is put together in the workspace's staged buffer, dense.
  };

  Run(const Parts& parts, ThreadPool& pool, std::span<HostStream* const> streams, Timeline* timeline);

  /// Throws the first error of this rank, after everything that was started has ended.
  void execute();

 private:
  void compute(int thread);
  /// Until the rows of A that the tile reads are there, of those that Operands::make_rows makes.
  void make_rows(std::int64_t tile, SpanLog& log);
  /// Returns whether the tile is done.
  bool compute_tile(std::int64_t tile, std::int64_t pass, TileUnit& unit, SpanLog& log);
  bool wait_for_start(std::int64_t tile, std::int64_t pass, SpanLog& log);
  /// Until the slice is there; meanwhile does other work, if there is any.
  void await_slice(std::int64_t slice, SpanLog& log);
  /// A compute thread after the last tile, while transfers are under way.
  void work_while_streams_run(SpanLog& log);
  [[nodiscard]] bool has_other_work() const {
    return parts_.mode == Mode::kRun && parts_.operands.other_work != nullptr;
  }
  /// One piece. False: there is none.
  bool do_other_work(SpanLog& log);
  [[nodiscard]] std::int64_t num_passes() const {
    return parts_.mode == Mode::kPlainGemm ? 1 : parts_.prepared.num_passes();
  }
  [[nodiscard]] TilePass pass_of(std::int64_t tile, std::int64_t pass) const;
  void add_received(std::int64_t tile, float* accumulator, SpanLog& log);
  [[nodiscard]] std::string report() const;
  void transfer_and_compute();
  void synchronize_streams();
  void restore(RestorePass& pass);

  [[nodiscard]] bool has_transfers() const;
  [[nodiscard]] bool has_gates() const { return parts_.mode == Mode::kRun; }
  [[nodiscard]] std::byte* product() const;
  [[nodiscard]] std::int64_t product_ld() const;
  [[nodiscard]] BufferTable buffers() const;
  [[nodiscard]] std::byte* scratch_of(int thread) const;
  [[nodiscard]] RestorePass::Buffers restore_buffers() const;

  Parts parts_;
  const OverlapPlan& plan_;
  ThreadPool& pool_;
  std::span<HostStream* const> streams_;
  Timeline* timeline_;
  plan::RowRuns row_runs_;  // none where A is there
  std::shared_ptr<Progress> progress_;
  SliceArrived has_arrived_;
  std::vector<SpanLog> compute_logs_;  // by thread
  std::vector<SpanLog> stream_logs_;   // by channel
  // Compute threads take schedule positions in order, those of all passes one after the other; nobody else
  // touches it.
  std::atomic<std::int64_t> next_position_{0};
  std::atomic<std::int64_t> next_rows_{0};    // the same for row_runs_
  std::atomic<std::int64_t> pieces_done_{0};  // of other work: their names
};

}  // namespace flashoverlap::cpu
