#include "cpu/blas.h"

#include <cblas.h>
#include <fmt/core.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "flashoverlap/cpu_executor.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#elif defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(const void* begin, unsigned long bytes);  // NOLINT: the sanitizer's name
extern "C" void __tsan_write_range(void* begin, unsigned long bytes);       // NOLINT: the sanitizer's name
#endif

namespace flashoverlap::cpu {
namespace {

// OpenBLAS has a fixed number of packing buffers, twice the threads it was built for (64 on Debian), one for
// each call in progress: beyond it warns, and later fails. More threads than this compute no faster, so they
// wait here instead.
constexpr int kMaxCalls = 128;

/// Holds one of kMaxCalls places. Not a std::counting_semaphore: that of GCC 12 can sleep for ever (GCC bug
/// 104928).
class CallPlace {
 public:
  CallPlace() {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [] { return taken_ < kMaxCalls; });
    ++taken_;
  }
  ~CallPlace() {
    {
      const std::scoped_lock lock(mutex_);
      --taken_;
    }
    freed_.notify_one();
  }
  CallPlace(const CallPlace&) = delete;
  CallPlace& operator=(const CallPlace&) = delete;

 private:
  static inline std::mutex mutex_;
  static inline std::condition_variable freed_;
  static inline int taken_ = 0;
};

std::mutex thread_count_mutex;
int thread_count_users = 0;
int thread_count_before = 0;

// The library is not instrumented: tell the sanitizers what it reads and writes, or they would miss every
// race and overrun in the operands of a product.
void report_access(const float* matrix, std::int64_t rows, std::int64_t cols, std::int64_t ld, bool write) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  for (std::int64_t row = 0; row < rows && cols > 0; ++row) {
    float* begin = const_cast<float*>(matrix) + row * ld;
    const auto bytes = static_cast<unsigned long>(cols) * sizeof(float);
#if defined(__SANITIZE_ADDRESS__)
    if (const void* bad = __asan_region_is_poisoned(begin, bytes); bad != nullptr) {
      *static_cast<volatile char*>(const_cast<void*>(bad)) = 0;  // reports with this stack
    }
    static_cast<void>(write);
#else
    if (write) {
      __tsan_write_range(begin, bytes);
    } else {
      __tsan_read_range(begin, bytes);
    }
#endif
  }
#else
  static_cast<void>(matrix), static_cast<void>(rows), static_cast<void>(cols), static_cast<void>(ld);
  static_cast<void>(write);
#endif
}

}  // namespace

SingleThreadedBlas::SingleThreadedBlas() {
  const std::scoped_lock lock(thread_count_mutex);
  if (thread_count_users++ == 0) {
    thread_count_before = openblas_get_num_threads();
    if (thread_count_before != 1) openblas_set_num_threads(1);
  }
}

SingleThreadedBlas::~SingleThreadedBlas() {
  const std::scoped_lock lock(thread_count_mutex);
  if (--thread_count_users == 0 && thread_count_before != 1) openblas_set_num_threads(thread_count_before);
}

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
          std::int64_t ldb, bool accumulate, float* c, std::int64_t ldc) {
  report_access(a, m, k, lda, false);
  report_access(b, n, k, ldb, false);
  report_access(c, m, n, ldc, true);
  if (k == 0) {  // the library rejects leading dimensions below 1, which are right here
    for (std::int64_t row = 0; row < m && !accumulate; ++row) std::fill_n(c + row * ldc, n, 0.0F);
    return;
  }
  const auto size = [](std::int64_t value) { return static_cast<blasint>(value); };
  const CallPlace place;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, size(m), size(n), size(k), 1.0F, a, size(lda), b,
              size(ldb), accumulate ? 1.0F : 0.0F, c, size(ldc));
}

void gemm_of_transposed(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda,
                        const float* b, std::int64_t ldb, float* c, std::int64_t ldc) {
  if (m == 0 || n == 0 || k == 0) return;
  report_access(a, k, m, lda, false);
  report_access(b, k, n, ldb, false);
  report_access(c, m, n, ldc, true);
  const auto size = [](std::int64_t value) { return static_cast<blasint>(value); };
  const CallPlace place;
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, size(m), size(n), size(k), 1.0F, a, size(lda), b,
              size(ldb), 1.0F, c, size(ldc));
}

}  // namespace flashoverlap::cpu

namespace flashoverlap {

std::string cpu_blas_name() {
  return fmt::format("{} ({})", openblas_get_config(), openblas_get_corename());
}

}  // namespace flashoverlap
