#include "flashoverlap/cpu_executor.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "core/fail.h"
#include "cpu/operands.h"
#include "cpu/prepared_plan.h"
#include "cpu/run.h"
#include "cpu/thread_pool.h"
#include "cpu/workspace.h"

namespace flashoverlap::cpu {
namespace {

class CpuExecutor final : public Executor {
 public:
  CpuExecutor(std::shared_ptr<Communicator> communicator, const CpuExecutorOptions& options)
      : communicator_(std::move(communicator)),
        options_(options),
        pool_(options.num_threads, fmt::format("r{} compute", communicator_->rank())),
        workspace_(options.workspace_limit_bytes) {}

  std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) override {
    auto prepared = std::make_unique<CpuPreparedPlan>(std::move(plan));
    check_rank(*prepared);
    check_heap(*prepared);
    workspace_.reserve(need_of(*prepared, false), prepared->label());
    make_streams(num_streams(*prepared));
    return prepared;
  }

  void execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) override {
    try {
      auto* plan = dynamic_cast<CpuPreparedPlan*>(&prepared);
      if (plan == nullptr)
        core::fail(ErrorKind::kBadArgument, "the plan was prepared by another kind of executor");
      check_rank(*plan);
      check_operands(*plan, operands);
      const bool staged = needs_staging(*plan, operands, mode);
      workspace_.reserve(need_of(*plan, staged), plan->label());
      make_streams(num_streams(*plan));
      if (options_.poison_workspace) workspace_.fill_with_nan();
      Run run({*plan, operands, mode, *communicator_, options_.hooks, workspace_, staged}, pool_, streams_,
              timeline);
      run.execute();
    } catch (const std::exception& error) {
      // Other ranks may be waiting for this one; idempotent where the run has done it already.
      if (communicator_->size() > 1) communicator_->abort(error.what());
      throw;
    }
  }

  [[nodiscard]] bool makes_rows() const override { return true; }

  [[nodiscard]] std::int64_t workspace_bytes() const override { return workspace_.size_bytes(); }

 private:
  void check_rank(const CpuPreparedPlan& prepared) const {
    const OverlapPlan& plan = prepared.plan();
    if (plan.rank == communicator_->rank() && plan.world_size == communicator_->size()) return;
    core::fail(ErrorKind::kBadArgument, "plan of {} is for rank {} of {}; this executor is rank {} of {}",
               prepared.label(), plan.rank, plan.world_size, communicator_->rank(), communicator_->size());
  }

  void check_heap(const CpuPreparedPlan& prepared) const {
    if (!prepared.has_puts() || communicator_->symmetric_heap() != nullptr) return;
    core::fail(
        ErrorKind::kUnsupported,
        "{} has puts, but ranks of communicator '{}' cannot write into each other's memory; plan it with "
        "collectives, or with sends and receives",
        prepared.label(), communicator_->name());
  }

  /// One for each channel, and one that waits for what others put here.
  static std::size_t num_streams(const CpuPreparedPlan& prepared) {
    return prepared.channels().size() + (prepared.has_puts() ? 1 : 0);
  }

  /// Whether the output must be made dense in the workspace first: a transfer of the plan moves it as
  /// consecutive elements, or the plain product has another shape than the output.
  static bool needs_staging(const CpuPreparedPlan& prepared, const Operands& operands, Mode mode) {
    const OverlapPlan& plan = prepared.plan();
    if (mode == Mode::kPlainGemm) {
      return plan.grid.rows() != plan.output_rows || plan.grid.cols() != plan.output_cols;
    }
    return prepared.moves_output() && operands.ldo != plan.output_cols;
  }

  [[nodiscard]] Workspace::Need need_of(const CpuPreparedPlan& prepared, bool staged) const {
    const OverlapPlan& plan = prepared.plan();
    Workspace::Need need = prepared.workspace_need();
    need.scratch = pool_.num_threads() * TileUnit::scratch_bytes(prepared);
    if (staged) {
      const std::int64_t rows = std::max(plan.grid.rows(), plan.output_rows);
      need.staged = rows * std::max(plan.grid.cols(), plan.output_cols) * size_of(plan.dtype);
    }
    return need;
  }

  void make_streams(std::size_t count) {
    while (streams_.size() < count) {
      const std::string name = fmt::format("r{} stream {}", communicator_->rank(), streams_.size());
      std::unique_ptr<Stream> stream = communicator_->make_stream(name);
      auto* host_stream = dynamic_cast<HostStream*>(stream.get());
      if (host_stream == nullptr) {
        core::fail(ErrorKind::kUnsupported,
                   "communicator '{}' has no host streams; the CPU executor needs them",
                   communicator_->name());
      }
      owned_streams_.push_back(std::move(stream));
      streams_.push_back(host_stream);
    }
  }

  std::shared_ptr<Communicator> communicator_;
  CpuExecutorOptions options_;
  ThreadPool pool_;
  Workspace workspace_;
  std::vector<std::unique_ptr<Stream>> owned_streams_;
  std::vector<HostStream*> streams_;  // the same ones; by CpuPreparedPlan::stream_of
};

}  // namespace
}  // namespace flashoverlap::cpu

namespace flashoverlap {

std::unique_ptr<Executor> make_cpu_executor(std::shared_ptr<Communicator> communicator,
                                            const CpuExecutorOptions& options) {
  if (communicator == nullptr) core::fail(ErrorKind::kBadArgument, "communicator is null");
  if (options.num_threads < 1) {
    core::fail(ErrorKind::kBadArgument, "num_threads is {}; it must be at least 1", options.num_threads);
  }
  if (options.workspace_limit_bytes < 0) {
    core::fail(ErrorKind::kBadArgument, "workspace_limit_bytes is {}; it must be at least 0 (no limit)",
               options.workspace_limit_bytes);
  }
  return std::make_unique<cpu::CpuExecutor>(std::move(communicator), options);
}

}  // namespace flashoverlap
