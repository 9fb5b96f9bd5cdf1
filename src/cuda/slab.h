// Parts of one stretch of memory. Host code.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace flashoverlap::cuda {

/// Which parts are taken, by their offsets: the first that is large enough is given; free neighbours are one.
/// Not thread-safe.
class Slab {
 public:
  explicit Slab(std::int64_t bytes);

  /// Parts begin at multiples of this, and are at least as long.
  static constexpr std::int64_t kAlignment = 1024;

  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  /// Of the longest part that `take` could give now.
  [[nodiscard]] std::int64_t longest_free() const;

  /// Where a part of at least so many bytes begins; nothing where none is free.
  [[nodiscard]] std::optional<std::int64_t> take(std::int64_t bytes);
  /// `offset`: what `take` gave.
  void give_back(std::int64_t offset);

 private:
  std::int64_t bytes_;
  std::map<std::int64_t, std::int64_t> free_, taken_;  // bytes, by offset
};

}  // namespace flashoverlap::cuda
