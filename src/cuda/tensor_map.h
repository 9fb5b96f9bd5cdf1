// Descriptors for the copy engine of sm_90 (tensor maps).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashoverlap::cuda {

/// A map of a row-major matrix of 16-bit elements with `rows` x `cols` elements, `ld` elements from row to
/// row, moved in boxes of `box_rows` x 64 elements that lie in shared memory with the 128-byte swizzle. What
/// lies outside the matrix is not written by stores. Needs: `base` and `ld` * 2 multiples of 16 bytes,
/// box_rows <= 256. Throws where the driver refuses.
CUtensorMap make_store_map(void* base, std::int64_t rows, std::int64_t cols, std::int64_t ld, int box_rows);

}  // namespace flashoverlap::cuda
