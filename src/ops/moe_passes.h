#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/thread_pool.h"
#include "flashoverlap/executor.h"
#include "flashoverlap/moe_layer.h"
#include "ops/moe_rows.h"

/// What a MoE layer does to rows between its GEMMs: passes over memory, spread over threads. All rows are
/// dense but for the caller's matrices.
namespace flashoverlap::ops {

/// Calls function(begin, end) for pieces of [0, count) on the pool's threads. The first exception is thrown
/// here, after all have ended.
void in_parallel(cpu::ThreadPool& pool, std::int64_t count,
                 const std::function<void(std::int64_t begin, std::int64_t end)>& function);

/// A caller's matrix of the layer's type.
struct RowsView {
  const std::byte* data = nullptr;
  std::int64_t ld_bytes = 0;
};

/// Where the rows of one rank go: expert rows first, then what is sent to other ranks.
struct RowPlaces {
  std::int64_t num_rows = 0;              ///< Expert rows, and rows for other ranks.
  std::vector<std::int64_t> of_send_row;  ///< For each send row, its place.
  /// [first, last) of the padding, in expert rows.
  std::vector<std::pair<std::int64_t, std::int64_t>> padding;
};
RowPlaces make_row_places(const MoeLayout& layout, std::int64_t own_begin, std::int32_t rank);

/// to[place of r] = from[token of r], or weight * it when `routing` is not null; padding becomes 0.
void gather_rows(cpu::ThreadPool& pool, const SendRows& rows, const RowPlaces& places, const RowsView& from,
                 std::int64_t cols, DType dtype, const MoeRouting* routing, std::byte* to);

/// How one expert's middle is made: activated [rows, I] from hidden [rows, U].
struct MoeActivation {
  Activation activation;
  bool gated;
  std::int64_t intermediate;
  [[nodiscard]] std::int64_t hidden_cols() const { return gated ? 2 * intermediate : intermediate; }
};
void activate_rows(cpu::ThreadPool& pool, const MoeActivation& how, std::int64_t rows, DType dtype,
                   const std::byte* hidden, std::byte* activated);
/// hidden_gradient [rows, U] from that of `activated`.
void activate_backward(cpu::ThreadPool& pool, const MoeActivation& how, std::int64_t rows, DType dtype,
                       const std::byte* hidden, const std::byte* activated_gradient,
                       std::byte* hidden_gradient);

/// out[t] = sum over slots, in their order, of results[row of (t, slot)], times its weight when `weighted`.
void reduce_rows(cpu::ThreadPool& pool, const MoeRouting& routing, const SendRows& rows,
                 const std::byte* results, std::int64_t cols, DType dtype, bool weighted, std::byte* out,
                 std::int64_t out_ld_bytes);

}  // namespace flashoverlap::ops
