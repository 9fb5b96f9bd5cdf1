// Restore: received elements go to where they belong, fused with what follows, in one pass over memory.
//
// Source: arXiv 2504.19519 (FlashOverlap), section 4.3 (post-communication reordering fused with the next element-wise or
// normalisation kernel).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashoverlap/dtype.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::cuda {

/// A band of output rows on the device; see RestoreBand. 16 bytes.
struct alignas(16) DeviceBand {
  std::int32_t row_begin = 0;
  std::int32_t first_piece = 0;
  std::int32_t num_pieces = 0;
  std::int32_t piece_cols = 0;  ///< width of all pieces but the last; 0: they differ
};
/// A piece of a band; see RestorePiece. 16 bytes.
struct alignas(16) DevicePiece {
  std::int64_t offset = 0;
  std::int32_t col_begin = 0;
  std::int32_t cols = 0;
};

/// Where the received elements lie. All pointers null: the source is row-major with `source_ld`.
struct DeviceRestore {
  const std::int32_t* band_of_row = nullptr;  ///< [rows of the output]
  const DeviceBand* bands = nullptr;
  const DevicePiece* pieces = nullptr;
  bool is_aligned = false;  ///< all offsets, column begins and widths but the last are multiples of 8 elements
};

/// out[i, :] = epilogue(restored row i) for rows [row_begin, row_begin + rows); see flashoverlap::Epilogue for the formula.
/// Arithmetic in float32; results are bitwise repeatable. 16-byte accesses where everything is aligned to 16 bytes and n is a
/// multiple of 8, element by element otherwise. With RMSNorm n is at most kMaxNormCols.
struct RestoreParams {
  DType dtype = DType::kBFloat16;  ///< kBFloat16 or kFloat16: of source, out and all epilogue operands
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t n = 0;
  const void* source = nullptr;  ///< packed or received buffer; may be `out` only where the source is row-major
  std::int64_t source_ld = 0;    ///< row-major source only
  DeviceRestore restore;
  void* out = nullptr;  ///< [all rows, n]
  std::int64_t ldo = 0;
  Epilogue epilogue;
};

constexpr std::int64_t kMaxNormCols = 32768;

/// Enqueues one kernel (none when there is nothing to do: no rows). Throws Error(kBadArgument), Error(kUnsupported) for
/// float32 or RMSNorm over more than kMaxNormCols columns, Error(kDevice).
void launch_restore(const RestoreParams& params, cudaStream_t stream);

/// Loads all restore kernels on the current device.
void load_restore_kernels();

}  // namespace flashoverlap::cuda
