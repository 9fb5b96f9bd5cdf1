#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "flashoverlap/plan.h"

namespace flashoverlap::cpu {

/// Memory that grows, is aligned for vectors and pages, and forgets its contents when it grows.
class AlignedBuffer {
 public:
  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::int64_t size_bytes() const { return size_bytes_; }
  /// Frees what is held, then allocates. Throws Error(kOutOfMemory) saying what it was for.
  void grow(std::int64_t bytes, std::string_view purpose);
  void fill_with_nan();

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::int64_t size_bytes_ = 0;
};

/// The buffers that all plans of one executor use in turn.
class Workspace {
 public:
  /// `limit_bytes` 0: no limit.
  explicit Workspace(std::int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  /// Bytes that a run needs of each buffer.
  struct Need {
    std::int64_t packed = 0;
    std::int64_t received = 0;
    std::int64_t staged =
        0;  ///< A dense copy of an output that a transfer needs dense and the caller has strided.
    std::int64_t scratch = 0;  ///< For all compute threads together.
    std::int64_t partial = 0;  ///< Sums of tiles between passes.
    [[nodiscard]] std::int64_t total() const { return packed + received + staged + scratch + partial; }
  };

  /// Grows the buffers to at least `need`. Throws Error(kOutOfMemory), with nothing changed when the limit
  /// forbids it.
  void reserve(const Need& need, std::string_view purpose);
  void fill_with_nan();

  [[nodiscard]] std::byte* packed() const { return packed_.data(); }
  [[nodiscard]] std::byte* received() const { return received_.data(); }
  [[nodiscard]] std::byte* staged() const { return staged_.data(); }
  [[nodiscard]] std::byte* scratch() const { return scratch_.data(); }
  [[nodiscard]] std::byte* partial() const { return partial_.data(); }
  [[nodiscard]] std::int64_t size_bytes() const { return held().total(); }

 private:
  [[nodiscard]] Need held() const;

  std::int64_t limit_bytes_;
  AlignedBuffer packed_;
  AlignedBuffer received_;
  AlignedBuffer staged_;
  AlignedBuffer scratch_;
  AlignedBuffer partial_;
};

}  // namespace flashoverlap::cpu
