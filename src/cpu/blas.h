#pragma once

#include <cstdint>

/// The one place that knows which library computes matrix products.
namespace flashoverlap::cpu {

/// The largest size or leading dimension that the library's 32-bit interface takes.
constexpr std::int64_t kMaxBlasSize = INT32_MAX;

/// Keeps OpenBLAS from starting threads of its own while any of these exists in the process: tiles are spread
/// over our threads already. The count that was set before comes back with the last one.
class SingleThreadedBlas {
 public:
  SingleThreadedBlas();
  ~SingleThreadedBlas();
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;
};

/// C[m,n] = A[m,k] · B[n,k]^T, or C += … when `accumulate`. Row-major, leading dimensions lda, ldb, ldc; any
/// size may be 0. The bits of the result depend on m, n, k and the values alone, not on where C lies.
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
          std::int64_t ldb, bool accumulate, float* c, std::int64_t ldc);

/// C[m,n] += A[k,m]^T · B[k,n], likewise.
void gemm_of_transposed(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda,
                        const float* b, std::int64_t ldb, float* c, std::int64_t ldc);

}  // namespace flashoverlap::cpu
