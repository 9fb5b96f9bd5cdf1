#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "flashoverlap/dtype.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::plan {

/// Which row of a mixture-of-experts layer goes where, on one rank in one call.
struct MoeRowTables {
  /// For each row that is made for the first GEMM: the token it is a copy of, or -1: zeros; and its place
  /// among the rows of the first GEMM's input.
  std::vector<std::int32_t> token, place;
  /// [tokens, top_k]: the row of the second GEMM's output, or -1: none; and its weight.
  std::vector<std::int32_t> result;
  std::vector<float> weight;
  std::int64_t tokens = 0;
  std::int32_t top_k = 1;
};

/// What a layer of experts needs of a device besides GEMMs and transfers: memory, and the passes over rows
/// between them. Everything is put into `stream`, the stream of the call. One object per layer, for one rank.
class MoeDevice {
 public:
  enum class Buffer { kRows, kHidden, kActivated, kResults, kNothing };
  static constexpr std::size_t kNumBuffers = 5;

  MoeDevice() = default;
  MoeDevice(const MoeDevice&) = delete;
  MoeDevice& operator=(const MoeDevice&) = delete;
  virtual ~MoeDevice() = default;

  /// Error(kBadArgument), naming the matrix, for an address that is not in the device's memory.
  virtual void check_address(std::string_view name, const void* address) const = 0;

  /// Memory of at least so many bytes. When it grows, what it held is lost, and calls before this one are
  /// waited for. Error(kOutOfMemory).
  virtual void* reserve(Buffer buffer, std::int64_t bytes) = 0;
  /// Bytes of all of them.
  [[nodiscard]] virtual std::int64_t reserved_bytes() const = 0;
  virtual void poison(Buffer buffer, void* stream) = 0;

  /// The tables of the calls below. Waits until the calls before, but for the last one, have ended.
  virtual void set_rows(const MoeRowTables& tables) = 0;

  /// to[place, :] = x[token, :], both with rows of `cols` elements; to is dense, x has leading dimension ldx.
  virtual void gather(const void* x, std::int64_t ldx, std::int64_t cols, DType dtype, void* to,
                      void* stream) = 0;
  /// activated [rows, cols] = activation(h[:, 0:cols]), times h[:, cols:2 cols] when gated; both dense.
  virtual void activate(const void* h, std::int64_t rows, std::int64_t cols, Activation activation,
                        bool gated, DType dtype, void* activated, void* stream) = 0;
  /// out[t, :] = sum over slots, in their order, of weight * results[row, :], in float32, rounded once.
  virtual void reduce(const void* results, std::int64_t cols, DType dtype, void* out, std::int64_t ldo,
                      void* stream) = 0;
  /// Ends the passes of a call: what set_rows and reserve wait for.
  virtual void end(void* stream) = 0;
};

}  // namespace flashoverlap::plan
