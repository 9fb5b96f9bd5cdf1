// Random operands and an independent check of a product, on the device. Elements are bf16 or fp16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace bench {

enum class Element16 { kBf16, kFp16 };

// Uniform in [-1, 1).
void fill_random(Element16 type, void* data, std::int64_t count, std::uint64_t seed, cudaStream_t stream);

// Adds to *errors the number of 4096 random elements of D = A · Bᵀ that differ from a float64 dot product by
// more than relative_bound * |exact| + absolute_bound. NaN counts.
void check_samples(Element16 type, const void* a, const void* b, int m, int n, int k, const void* d,
                   double relative_bound, double absolute_bound, unsigned* errors, cudaStream_t stream);

// Adds to *errors the number of elements in which x and y differ by more than the bound. NaN counts.
void count_differences(Element16 type, const void* x, const void* y, std::int64_t count, float relative_bound,
                       float absolute_bound, unsigned* errors, cudaStream_t stream);

// A dense tile in a packed buffer.
struct PackedTile {
  std::int64_t offset;
  int row, col, rows, cols;
};

// Copies dense tiles to their places in a row-major matrix.
void unpack_tiles(const PackedTile* tiles, int num_tiles, const void* packed, void* d, std::int64_t ldd,
                  cudaStream_t stream);

}  // namespace bench
