// Restore: received elements go to where they belong, fused with what follows, in one pass over memory.
//
// Source: arXiv 2504.19519 (FlashOverlap), section 4.3 (post-communication reordering fused with the next
// element-wise or normalisation kernel).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashoverlap/dtype.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::cuda {

/// Where an output row lies: its pieces begin at first_piece, and it is row `row_in_band` of each. See
/// RestoreBand. One entry a row, so that the kernel finds an element in two look-ups that do not wait for
/// each other's row.
struct alignas(8) DeviceRow {
  std::int32_t first_piece = 0;
  std::int32_t row_in_band = 0;
};
/// A piece of a band; see RestorePiece. 16 bytes. The last piece of a band ends at column n.
struct alignas(16) DevicePiece {
  std::int64_t offset = 0;
  std::int32_t col_begin = 0;
  std::int32_t cols = 0;
};

/// Where the received elements lie. All pointers null: the source is row-major with `source_ld`.
struct DeviceRestore {
  const DeviceRow* rows = nullptr;  ///< [rows of the output]
  const DevicePiece* pieces = nullptr;
  std::int32_t piece_cols = 0;  ///< width of all pieces but the last of each band; 0: they differ
  bool is_aligned = false;      ///< all offsets, column begins and widths are multiples of 8 elements
};

/// What one element is the sum of, in float32 and in this order: of each source the element at the same
/// offset.
struct PartialSums {
  static constexpr int kMost = 16;
  const void* sources[kMost] = {};
  int count = 0;  ///< 0: the element is RestoreParams::source's alone.
};

/// out[i, :] = epilogue(restored row i) for rows [row_begin, row_begin + rows); see flashoverlap::Epilogue
/// for the formula. Arithmetic in float32; results are bitwise repeatable. 16-byte accesses where everything
/// is aligned to 16 bytes and n is a multiple of 8 (with RMSNorm: and at most 16384), element by element
/// otherwise. `residual` may be `residual_out` or `out`.
struct RestoreParams {
  DType dtype = DType::kBFloat16;  ///< kBFloat16 or kFloat16: of source, out and all epilogue operands
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t n = 0;
  const void* source =
      nullptr;                 ///< packed or received buffer; may be `out` only where the source is row-major
  std::int64_t source_ld = 0;  ///< row-major source only
  PartialSums sums;
  DeviceRestore restore;
  void* out = nullptr;  ///< [all rows, n]
  std::int64_t ldo = 0;
  Epilogue epilogue;
};

/// Whether the epilogue leaves the sum as it is, and stores nothing else.
[[nodiscard]] inline bool is_plain(const Epilogue& e) {
  return e.bias == nullptr && e.activation == Activation::kNone && e.residual == nullptr &&
         e.residual_out == nullptr && e.rms_norm_weight == nullptr;
}

/// Enqueues one kernel (none when there is nothing to do: no rows). Throws Error(kBadArgument),
/// Error(kUnsupported) for float32, Error(kDevice).
void launch_restore(const RestoreParams& params, cudaStream_t stream);

/// Loads all restore kernels on the current device.
void load_restore_kernels();

}  // namespace flashoverlap::cuda
