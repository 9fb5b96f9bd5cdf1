#include "cpu/run.h"

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/fail.h"
#include "core/half.h"
#include "core/watchdog.h"
#include "cpu/blas.h"
#include "cpu/epilogue.h"
#include "cpu/put_window.h"
#include "cpu/rank_order_sum.h"
#include "cpu/restore_pass.h"
#include "cpu/run_error.h"
#include "flashoverlap/watchdog.h"

namespace flashoverlap::cpu {

Run::Run(const Parts& parts, ThreadPool& pool, std::span<HostStream* const> streams, Timeline* timeline)
    : parts_(parts),
      plan_(parts.prepared.plan()),
      pool_(pool),
      streams_(streams.first(parts.prepared.channels().size() + (parts.prepared.has_puts() ? 1U : 0U))),
      timeline_(timeline),
      row_runs_(parts.operands.make_rows ? plan::RowRuns(plan_) : plan::RowRuns()),
      progress_(std::make_shared<Progress>(plan_, parts.prepared.num_passes(), row_runs_.size())),
      has_arrived_([this](std::int64_t slice) {
        const std::int64_t slices = std::ssize(plan_.slices);
        if (slice < 0 || slice >= slices) {
          core::fail(ErrorKind::kBadArgument, "slice {} is asked for; the plan has {}", slice, slices);
        }
        return progress_->has_slice(slice);
      }) {
  const bool recorded = timeline != nullptr;
  for (int thread = 0; thread < pool.num_threads(); ++thread) {
    compute_logs_.emplace_back(recorded, plan_.rank, fmt::format("compute {}", thread));
  }
  for (const std::int32_t channel : parts.prepared.channels()) {
    stream_logs_.emplace_back(recorded, plan_.rank, fmt::format("stream {}", channel));
  }
}

void Run::execute() {
  const RowEpilogue epilogue(parts_.operands.epilogue, plan_.dtype, plan_.output_cols);
  RestorePass pass(plan_, epilogue, restore_buffers());
  transfer_and_compute();
  if (parts_.mode == Mode::kRun && pass.needed()) restore(pass);
  if (timeline_ == nullptr) return;
  for (const SpanLog& log : compute_logs_) log.append_to(*timeline_);
  for (const SpanLog& log : stream_logs_) log.append_to(*timeline_);
}

// For the watchdog report: how far this run has come.
std::string Run::report() const {
  using nlohmann::json;
  const std::int64_t positions = std::ssize(plan_.schedule) * num_passes();
  json groups = json::array();
  for (const Progress::Count& count : progress_->counts()) {
    groups.push_back({{"tiles_done", count.done}, {"tiles", count.expected}});
  }
  const json report = {{"operation", parts_.prepared.label()},
                       {"rank", plan_.rank},
                       {"next_position", std::min(next_position_.load(), positions)},
                       {"positions", positions},
                       {"groups", std::move(groups)}};
  return report.dump();
}

void Run::transfer_and_compute() {
  // Only where somebody will read it: calls may be shorter than this takes.
  std::optional<core::WatchdogSource> source;
  if (!watchdog_file().empty()) source.emplace("runs", [this] { return report(); });
  TransferQueue queue(
      {parts_.prepared, parts_.communicator, parts_.hooks, buffers(), parts_.mode == Mode::kRun}, progress_,
      stream_logs_);
  std::optional<PutWindow> window;  // closed once the streams have ended
  try {
    if (has_transfers() && parts_.prepared.has_puts()) window.emplace(parts_, buffers(), progress_);
    if (has_transfers()) queue.enqueue_all(streams_);
    if (parts_.mode != Mode::kCommunicationOnly && (!plan_.schedule.empty() || has_other_work())) {
      const SingleThreadedBlas single_threaded;
      pool_.run([this](int thread) { compute(thread); });
    }
  } catch (...) {
    // Tasks in the streams use this frame: stop them before it goes away.
    fail_run(*progress_, parts_.communicator, std::current_exception(),
             fmt::format("rank {}, {}", plan_.rank, parts_.prepared.label()));
  }
  synchronize_streams();
  if (const std::exception_ptr error = progress_->error(); error != nullptr) std::rethrow_exception(error);
}

void Run::synchronize_streams() {
  for (HostStream* stream : streams_) {
    try {
      stream->synchronize();
    } catch (const RunStopped&) {  // unwound: the cause is elsewhere
    } catch (const Error& error) {
      // A rank that failed on its own does not know what this one was doing.
      const std::string& label = parts_.prepared.label();
      const bool says_where = std::string_view(error.what()).find(label) != std::string_view::npos;
      progress_->fail(says_where
                          ? std::current_exception()
                          : std::make_exception_ptr(with_place(
                                std::current_exception(), fmt::format("rank {}, {}", plan_.rank, label))));
    } catch (...) {
      progress_->fail(std::current_exception());
    }
  }
}

void Run::compute(int thread) {
  // Units that communicate leave their cores to the streams.
  if (plan_.resources.communication_units > 0 && thread >= plan_.resources.compute_units) return;
  TileUnit unit(parts_.prepared, scratch_of(thread));
  SpanLog& log = compute_logs_[static_cast<std::size_t>(thread)];
  const std::int64_t tiles = std::ssize(plan_.schedule);
  while (!progress_->failed()) {
    const std::int64_t taken = next_position_.fetch_add(1, std::memory_order_relaxed);
    if (taken >= tiles * num_passes()) return work_while_streams_run(log);
    const std::int64_t position = taken % tiles;
    const std::int64_t tile = plan_.schedule[static_cast<std::size_t>(position)];
    bool done = false;
    try {
      if (row_runs_.size() > 0) make_rows(tile, log);
      const double begin_us = log.now_us();
      done = compute_tile(tile, taken / tiles, unit, log);
      log.add(SpanKind::kCompute, "tile ", tile, begin_us);
    } catch (const RunStopped&) {
      return;
    } catch (...) {
      const std::string where = fmt::format("rank {}, tile {} of wave group {} of {}", plan_.rank, tile,
                                            parts_.prepared.group_at(position), parts_.prepared.label());
      return fail_run(*progress_, parts_.communicator, std::current_exception(), where);
    }
    if (parts_.mode == Mode::kPlainGemm) continue;
    if (done) {
      progress_->count_tile(parts_.prepared.group_at(position));
    } else {
      progress_->count_pass(tile);
    }
  }
}

void Run::make_rows(std::int64_t tile, SpanLog& log) {
  const std::int64_t needed = row_runs_.of_tile(tile);
  // Where another thread is at these rows already, this one makes the next ones rather than wait.
  while (!progress_->has_rows(needed)) {
    const std::int64_t run = next_rows_.fetch_add(1, std::memory_order_relaxed);
    if (run >= row_runs_.size() || progress_->failed()) return progress_->wait_for_rows(needed);
    const double begin_us = log.now_us();
    const plan::RowRun& rows = row_runs_.at(run);
    parts_.operands.make_rows(rows.first, rows.count);
    log.add(SpanKind::kCompute, "rows ", run, begin_us);
    progress_->mark_rows(run);
  }
}

bool Run::compute_tile(std::int64_t tile, std::int64_t pass, TileUnit& unit, SpanLog& log) {
  if (pass == 0 && parts_.hooks.before_tile) parts_.hooks.before_tile(tile);
  const bool adds = wait_for_start(tile, pass, log);
  const TileInputs inputs{static_cast<const std::byte*>(parts_.operands.a), parts_.operands.lda,
                          static_cast<const std::byte*>(parts_.operands.b), parts_.operands.ldb,
                          parts_.workspace.received()};
  TileTarget target{
      .segments = {}, .packed = parts_.workspace.packed(), .matrix = product(), .ld = product_ld()};
  if (parts_.mode != Mode::kPlainGemm) {
    target.segments = plan_.placement.of_tile(tile);
    target.row_shift = plan_.output_row_shift;
    target.col_shift = plan_.output_col_shift;
  }
  unit.run(plan_.grid.tile(tile), inputs, pass_of(tile, pass), target, adds,
           [&](float* accumulator) { add_received(tile, accumulator, log); });
  return pass + 1 == num_passes();
}

/// Until all is there that the pass reads. Returns whether the tile's epilogue adds what has been received.
bool Run::wait_for_start(std::int64_t tile, std::int64_t pass, SpanLog& log) {
  if (pass > 0) progress_->wait_for_pass(tile, pass);
  if (!has_gates()) return false;
  const std::int64_t end = parts_.prepared.pass(pass).end;
  const bool last = pass + 1 == num_passes();
  bool adds = false;
  for (const Gate& gate : parts_.prepared.gates_of(tile)) {
    adds |= gate.point == GatePoint::kFinish;
    if (gate.point == GatePoint::kStart && (last || gate.k_begin < end)) {
      await_slice(gate.slice, log);
    }
  }
  return adds;
}

void Run::await_slice(std::int64_t slice, SpanLog& log) {
  if (has_other_work()) {
    while (!progress_->has_slice(slice) && !progress_->failed() && do_other_work(log)) {
    }
  }
  progress_->wait_for_slice(slice);
}

void Run::work_while_streams_run(SpanLog& log) {
  if (!has_other_work()) return;
  try {
    while (progress_->has_running_streams() && !progress_->failed() && do_other_work(log)) {
    }
  } catch (...) {
    fail_run(*progress_, parts_.communicator, std::current_exception(),
             fmt::format("rank {}, after the tiles of {}", plan_.rank, parts_.prepared.label()));
  }
}

bool Run::do_other_work(SpanLog& log) {
  const double begin_us = log.now_us();
  try {
    if (parts_.hooks.before_other_work) parts_.hooks.before_other_work();
    if (!parts_.operands.other_work(has_arrived_)) return false;
  } catch (...) {
    throw with_place(std::current_exception(), "other work");
  }
  log.add(SpanKind::kOther, "other work ", pieces_done_.fetch_add(1, std::memory_order_relaxed), begin_us);
  return true;
}

TilePass Run::pass_of(std::int64_t tile, std::int64_t pass) const {
  const CpuPreparedPlan& prepared = parts_.prepared;
  if (parts_.mode == Mode::kPlainGemm) return {.loop = prepared.whole_loop()};
  TilePass result{.loop = prepared.pass(pass)};
  if (prepared.keeps_partial_sums()) {
    result.sum = reinterpret_cast<float*>(parts_.workspace.partial()) + prepared.partial_offset(tile);
  }
  return result;
}

void Run::add_received(std::int64_t tile, float* accumulator, SpanLog& log) {
  std::vector<const std::byte*> lower;
  std::vector<const std::byte*> higher;
  for (const Gate& gate : parts_.prepared.gates_of(tile)) {
    if (gate.point != GatePoint::kFinish) continue;
    await_slice(gate.slice, log);
    const std::int32_t source = plan_.slices[static_cast<std::size_t>(gate.slice)].source;
    (source < plan_.rank ? lower : higher)
        .push_back(parts_.workspace.received() + gate.offset * size_of(plan_.dtype));
  }
  sum_in_rank_order(lower, higher, plan_.dtype, accumulator, plan_.grid.tile(tile).size());
}

void Run::restore(RestorePass& pass) {
  pool_.run([&](int thread) {
    SpanLog& log = compute_logs_[static_cast<std::size_t>(thread)];
    const double begin_us = log.now_us();
    pass.work(TileUnit(parts_.prepared, scratch_of(thread)).row_scratch());
    log.add(SpanKind::kEpilogue, "restore ", thread, begin_us);
  });
}

bool Run::has_transfers() const {
  return parts_.mode == Mode::kRun || parts_.mode == Mode::kCommunicationOnly;
}

std::byte* Run::product() const {
  return parts_.staged ? parts_.workspace.staged() : static_cast<std::byte*>(parts_.operands.out);
}

std::int64_t Run::product_ld() const {
  if (!parts_.staged) return parts_.operands.ldo;
  return parts_.mode == Mode::kPlainGemm ? plan_.grid.cols() : plan_.output_cols;
}

BufferTable Run::buffers() const {
  BufferTable table{};
  const auto at = [&](BufferKind kind) -> std::byte*& { return table[static_cast<std::size_t>(kind)]; };
  // Slices that other ranks hold land in A or B; plans without such transfers only read them.
  at(BufferKind::kInput) = static_cast<std::byte*>(const_cast<void*>(parts_.operands.a));
  at(BufferKind::kWeight) = static_cast<std::byte*>(const_cast<void*>(parts_.operands.b));
  at(BufferKind::kPacked) = parts_.workspace.packed();
  at(BufferKind::kReceived) = parts_.workspace.received();
  at(BufferKind::kOutput) = product();
  return table;
}

std::byte* Run::scratch_of(int thread) const {
  return parts_.workspace.scratch() + thread * TileUnit::scratch_bytes(parts_.prepared);
}

RestorePass::Buffers Run::restore_buffers() const {
  auto* out = static_cast<std::byte*>(parts_.operands.out);
  return {.source = buffers()[static_cast<std::size_t>(plan_.restore.source)],
          .product = product(),
          .product_ld = product_ld(),
          .out = out,
          .ldo = parts_.operands.ldo};
}

}  // namespace flashoverlap::cpu
