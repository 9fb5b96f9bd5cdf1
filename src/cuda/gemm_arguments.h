// What all kernels make of a SignalGemmArguments.
#pragma once

#include <cstdint>

#include "check.h"
#include "row_store.cuh"
#include "signal_gemm.h"

namespace flashoverlap::cuda {

inline OutputParams make_output_params(const SignalGemmArguments& args) {
  return {.packed = static_cast<std::uint16_t*>(args.packed),
          .output = static_cast<std::uint16_t*>(args.output),
          .ldd = args.ldd,
          .rows = args.output_rows > 0 ? args.output_rows : args.m,
          .cols = args.output_cols > 0 ? args.output_cols : args.n,
          .row_offsets = args.tables.row_offsets,
          .slab_rows_of = args.tables.slab_rows_of,
          .slab_rows = args.tables.slab_rows};
}

inline void check_blocks(const SignalGemmArguments& args) {
  std::int64_t columns = 0;
  for (const OperandBlock& block : args.blocks) {
    columns += block.depth;
    if (block.a != nullptr && block.depth >= 1 && block.k_begin >= 0 && block.k_begin + block.depth <= args.k)
      continue;
    throw_bad_argument("signal GEMM: a block of A at %p with columns from %d on, %d of them, of %d", block.a,
                       block.k_begin, block.depth, args.k);
  }
  if (columns != args.k)
    throw_bad_argument("signal GEMM: blocks of A have %lld columns, expected %d",
                       static_cast<long long>(columns), args.k);
  if (args.counters != nullptr || args.finish.gates.needed != nullptr)
    throw_bad_argument("signal GEMM: signals, or tiles that wait at their end, with A in %zu blocks",
                       args.blocks.size());
}

/// What every kernel needs of its arguments; alignment of operands is each kernel's own matter. Throws
/// Error(kBadArgument).
inline void check_shape(const SignalGemmArguments& args, int min_k) {
  if (args.m < 1 || args.n < 1 || args.k < min_k || args.num_weights < 1) {
    throw_bad_argument(
        "signal GEMM: m, n and the number of weights must be >= 1, k >= %d; got m %d, n %d, weights %d, k %d",
        min_k, args.m, args.n, args.num_weights, args.k);
  }
  if (static_cast<std::int64_t>(args.n) * args.num_weights > INT32_MAX) {
    throw_bad_argument("signal GEMM: %d weights of %d rows exceed 2^31 - 1 rows", args.num_weights, args.n);
  }
  if (!args.blocks.empty()) check_blocks(args);
  const bool has_matrix = args.a != nullptr && args.lda >= args.k;
  if ((args.blocks.empty() && !has_matrix) || args.b == nullptr || args.ldb < args.k) {
    throw_bad_argument(
        "signal GEMM: A and B must not be null, lda and ldb not less than k = %d; got A %p, lda %lld, B %p, "
        "ldb %lld",
        args.k, args.a, static_cast<long long>(args.lda), args.b, static_cast<long long>(args.ldb));
  }
  const OutputParams output = make_output_params(args);
  if (args.output != nullptr && args.ldd < output.cols) {
    throw_bad_argument("signal GEMM: ldd %lld is less than the %d columns of D",
                       static_cast<long long>(args.ldd), output.cols);
  }
  if (args.gates.needed != nullptr && args.finish.gates.needed != nullptr)
    throw_bad_argument("signal GEMM: tiles that wait both at their start and at their end");
  if (args.tables.schedule == nullptr || args.tables.num_positions < 1 || args.num_sms < 1) {
    throw_bad_argument(
        "signal GEMM: a schedule of at least one tile and at least one SM are needed; got %d tiles, %d SMs",
        args.tables.num_positions, args.num_sms);
  }
}

}  // namespace flashoverlap::cuda
