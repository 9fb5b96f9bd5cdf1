#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "flashoverlap/dtype.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::plan {

/// Which row of a mixture-of-experts layer goes where, on one rank in one call.
struct MoeRowTables {
  /// For each row that is made for the first GEMM: the slot of a token that it is made for, token * top_k +
  /// slot, or -1: zeros; and its place among the rows of the first GEMM's input.
  std::vector<std::int32_t> source, place;
  /// [tokens, top_k]: the row of the second GEMM's output, or -1: none; and its weight.
  std::vector<std::int32_t> result;
  std::vector<float> weight;
  std::int64_t tokens = 0;
  std::int32_t top_k = 1;
};

/// The rows of each local expert one behind the other, whoever owns them, for the products over rows.
struct MoeExpertRows {
  /// Experts begin at multiples of it, so that lengths, and with them what is asked of a matrix library, are
  /// few.
  static constexpr std::int64_t kUnit = 64;

  std::vector<std::int32_t> row;    ///< Among the expert rows, or -1: zeros.
  std::vector<std::int64_t> begin;  ///< Of each expert in `row`, and the end.
};

/// What a layer of experts needs of a device besides GEMMs and transfers: memory, the passes over rows
/// between them and, backward, what becomes of the weights. Everything is put into `stream`. All rows are
/// dense but for the caller's matrices. One object per layer, for one rank.
class MoeDevice {
 public:
  enum class Buffer {
    kRows,
    kHidden,
    kActivated,
    kResults,
    kNothing,
    // Backward.
    kGradientRows,       ///< As kRows.
    kActivatedGradient,  ///< As kActivated.
    kHiddenGradient,     ///< As kHidden.
    kResultGradient,     ///< As kResults.
    kTransposedUp,
    kTransposedDown,
    kLeftRows,  ///< Of a product over rows: MoeExpertRows::row many.
    kRightRows,
  };
  static constexpr std::size_t kNumBuffers = 13;

  MoeDevice() = default;
  MoeDevice(const MoeDevice&) = delete;
  MoeDevice& operator=(const MoeDevice&) = delete;
  virtual ~MoeDevice() = default;

  /// SMs that consumers may take at most; 0: this rank cannot write into other ranks' memory, nor they into
  /// its.
  [[nodiscard]] virtual std::int64_t most_consumers() const = 0;

  /// SMs that a GEMM takes which leaves none to communication.
  [[nodiscard]] virtual std::int64_t num_units() const = 0;
  /// Whether a consumer's SMs are taken from the GEMM beside it; else it has SMs of its own.
  [[nodiscard]] virtual bool consumers_take_units() const = 0;

  /// Tiles with which a GEMM over groups of rows, each with one of several weights [n, k], is quickest on so
  /// many units: groups[r] are the rows of rank r's groups, and the busiest rank counts. The same on all
  /// ranks with devices of one kind.
  struct TileSize {
    std::int64_t rows = 0;
    std::int64_t cols = 0;
  };
  [[nodiscard]] virtual TileSize choose_tile(std::span<const std::vector<std::int64_t>> groups,
                                             std::int64_t n, std::int64_t k, DType dtype,
                                             std::int64_t units) const = 0;

  /// What the consumer of a plan with puts told.
  struct PutTimes {
    double producer_us = 0;  ///< The GEMM.
    double backlog_us = 0;   ///< From its end to the end of the last put.
    double idle_us = 0;      ///< How long the consumer waited for segments.
  };
  /// Whether plans with puts are timed from now on.
  virtual void time_puts(bool on) = 0;
  /// Plans with puts carried out so far.
  [[nodiscard]] virtual std::int64_t put_calls() const = 0;
  /// Of the `call`-th of them, from 0. Nothing while it is not over, when it was not timed, or when there
  /// have been several since.
  [[nodiscard]] virtual std::optional<PutTimes> put_times(std::int64_t call) const = 0;

  /// Keeps the stream busy for about a millisecond, in which the host can enqueue what comes behind.
  virtual void hold(void* stream) = 0;
  /// Around what is to be timed.
  virtual void start_clock(void* stream) = 0;
  virtual void stop_clock(void* stream) = 0;
  /// Microseconds between the last two; waits until that is over. 0: it has been asked for already, or there
  /// was nothing.
  [[nodiscard]] virtual double clock_us() = 0;

  /// Error(kBadArgument), naming the matrix, for an address that is not in the device's memory.
  virtual void check_address(std::string_view name, const void* address) const = 0;

  /// Memory of at least so many bytes. When it grows, what it held is lost, and calls before this one are
  /// waited for. Error(kOutOfMemory).
  virtual void* reserve(Buffer buffer, std::int64_t bytes) = 0;
  /// Bytes of all of them.
  [[nodiscard]] virtual std::int64_t reserved_bytes() const = 0;
  virtual void poison(Buffer buffer, void* stream) = 0;

  /// The tables of the calls below. Waits until the calls before, but for the last one, have ended.
  virtual void set_rows(const MoeRowTables& tables) = 0;

  /// A stream for what nobody waits for until the end of a call. Nothing in it may wait for another rank but
  /// by way of `follow`.
  virtual void* side_stream() = 0;
  /// What is put into `stream` from now on waits for what is in `before` now.
  virtual void follow(void* stream, void* before) = 0;

  /// to[place, :] = x[token, :], times the slot's weight when `weighted`, in float32, rounded once; x has
  /// leading dimension ldx.
  virtual void gather(const void* x, std::int64_t ldx, std::int64_t cols, DType dtype, bool weighted,
                      void* to, void* stream) = 0;
  /// activated [rows, cols] = activation(h[:, 0:cols]), times h[:, cols:2 cols] when gated.
  virtual void activate(const void* h, std::int64_t rows, std::int64_t cols, Activation activation,
                        bool gated, DType dtype, void* activated, void* stream) = 0;
  /// out[t, :] = sum over slots, in their order, of results[row, :], times the weight when `weighted`, in
  /// float32, rounded once.
  virtual void reduce(const void* results, std::int64_t cols, DType dtype, bool weighted, void* out,
                      std::int64_t ldo, void* stream) = 0;

  /// h_gradient, as h, from that of `activated`.
  virtual void activate_backward(const void* h, const void* activated_gradient, std::int64_t rows,
                                 std::int64_t cols, Activation activation, bool gated, DType dtype,
                                 void* h_gradient, void* stream) = 0;
  /// to[i] = from[i]^T for a stack of `count` matrices [rows, cols] of 16-bit elements.
  virtual void transpose(const void* from, std::int64_t count, std::int64_t rows, std::int64_t cols, void* to,
                         void* stream) = 0;
  /// gradient[t, slot] = out_gradient[t, :] · results[row, :] in float32; 0 without a row. Bitwise
  /// repeatable.
  virtual void weight_gradient(const void* out_gradient, std::int64_t ldg, const void* results,
                               std::int64_t cols, DType dtype, float* gradient, void* stream) = 0;

  /// The table of both calls below, for the rows that the last set_rows told of: once for each set_rows.
  virtual void set_expert_rows(const MoeExpertRows& rows) = 0;
  /// to[i, :] = from[row[i], :], or zeros.
  virtual void order_by_expert(const void* from, std::int64_t cols, void* to, void* stream) = 0;
  /// to[e] = left_e^T · right_e, [left_cols, right_cols] in float32, over the rows of each expert in that
  /// order; zeros where it has none. Bitwise repeatable. May wait on the host for what is in any stream, so
  /// nothing that another rank waits for may come behind it.
  virtual void multiply_by_expert(const void* left, std::int64_t left_cols, const void* right,
                                  std::int64_t right_cols, DType dtype, float* to, void* stream) = 0;
  /// Ends the passes of a call: what set_rows and reserve wait for.
  virtual void end(void* stream) = 0;
};

}  // namespace flashoverlap::plan
