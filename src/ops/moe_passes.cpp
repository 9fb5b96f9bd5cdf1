#include "ops/moe_passes.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <numbers>

#include "core/half.h"
#include "cpu/epilogue.h"

namespace flashoverlap::ops {
namespace {

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Derivative of activation(x).
float slope(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone:
      return 1;
    case Activation::kRelu:
      return x > 0 ? 1.0F : 0.0F;
    case Activation::kGelu: {
      const float density =
          std::exp(-x * x / 2) * std::numbers::inv_sqrtpi_v<float> / std::numbers::sqrt2_v<float>;
      return (1 + std::erf(x / std::numbers::sqrt2_v<float>)) / 2 + x * density;
    }
    case Activation::kSilu: {
      const float s = 1 / (1 + std::exp(-x));
      return s + x * s * (1 - s);
    }
  }
  return 0;
}

}  // namespace

void in_parallel(cpu::ThreadPool& pool, std::int64_t count,
                 const std::function<void(std::int64_t, std::int64_t)>& function) {
  if (count == 0) return;
  // Several pieces for each thread: cores that others use as well take fewer.
  const std::int64_t pieces = std::min<std::int64_t>(count, 4 * pool.num_threads());
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::mutex mutex;
  pool.run([&](int) {
    try {
      for (std::int64_t piece = next++; piece < pieces; piece = next++) {
        function(count * piece / pieces, count * (piece + 1) / pieces);
      }
    } catch (...) {
      const std::scoped_lock lock(mutex);
      if (error == nullptr) error = std::current_exception();
    }
  });
  if (error != nullptr) std::rethrow_exception(error);
}

RowPlaces make_row_places(const MoeLayout& layout, std::int64_t own_begin, std::int32_t rank) {
  RowPlaces places;
  places.num_rows = layout.rows + layout.send_rows - layout.own_rows;
  places.of_send_row.resize(index(layout.send_rows));
  for (std::int64_t row = 0; row < layout.send_rows; ++row) {
    const std::int64_t skipped = row >= own_begin ? layout.own_rows : 0;
    places.of_send_row[index(row)] = layout.rows + row - skipped;
  }
  for (const MoeGroup& group : layout.groups) {
    if (group.padded_rows > group.rows) {
      places.padding.emplace_back(group.row_begin + group.rows, group.row_begin + group.padded_rows);
    }
    if (group.owner != rank) continue;
    for (std::int64_t row = 0; row < group.rows; ++row) {
      places.of_send_row[index(group.owner_row + row)] = group.row_begin + row;
    }
  }
  return places;
}

void gather_rows(cpu::ThreadPool& pool, const SendRows& rows, const RowPlaces& places, const RowsView& from,
                 std::int64_t cols, DType dtype, const MoeRouting* routing, std::byte* to) {
  const std::int64_t row_bytes = cols * size_of(dtype);
  if (row_bytes == 0) return;
  for (const auto& [first, last] : places.padding) {
    std::memset(to + first * row_bytes, 0, index((last - first) * row_bytes));
  }
  in_parallel(pool, std::ssize(rows.token), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> values(index(routing == nullptr ? 0 : cols));
    for (std::int64_t row = begin; row < end; ++row) {
      const std::byte* source = from.data + rows.token[index(row)] * from.ld_bytes;
      std::byte* target = to + places.of_send_row[index(row)] * row_bytes;
      if (routing == nullptr) {
        std::memcpy(target, source, index(row_bytes));
        continue;
      }
      const float weight = routing->weight(rows.token[index(row)], rows.slot[index(row)]);
      core::to_float(source, dtype, values.data(), cols);
      for (float& value : values) value *= weight;
      core::from_float(values.data(), dtype, target, cols);
    }
  });
}

void activate_rows(cpu::ThreadPool& pool, const MoeActivation& how, std::int64_t rows, DType dtype,
                   const std::byte* hidden, std::byte* activated) {
  const std::int64_t element = size_of(dtype);
  const std::int64_t cols = how.intermediate;
  in_parallel(pool, cols == 0 ? 0 : rows, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> values(index(how.hidden_cols()));
    for (std::int64_t row = begin; row < end; ++row) {
      core::to_float(hidden + row * how.hidden_cols() * element, dtype, values.data(), how.hidden_cols());
      cpu::activate(how.activation, values.data(), cols);
      for (std::int64_t i = 0; how.gated && i < cols; ++i) values[index(i)] *= values[index(cols + i)];
      core::from_float(values.data(), dtype, activated + row * cols * element, cols);
    }
  });
}

void activate_backward(cpu::ThreadPool& pool, const MoeActivation& how, std::int64_t rows, DType dtype,
                       const std::byte* hidden, const std::byte* activated_gradient,
                       std::byte* hidden_gradient) {
  const std::int64_t element = size_of(dtype);
  const std::int64_t cols = how.intermediate;
  in_parallel(pool, cols == 0 ? 0 : rows, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> before(index(how.hidden_cols()));
    std::vector<float> activated(index(cols));
    std::vector<float> gradient(index(cols));
    std::vector<float> result(index(how.hidden_cols()));
    for (std::int64_t row = begin; row < end; ++row) {
      core::to_float(hidden + row * how.hidden_cols() * element, dtype, before.data(), how.hidden_cols());
      core::to_float(activated_gradient + row * cols * element, dtype, gradient.data(), cols);
      std::copy_n(before.begin(), cols, activated.begin());
      cpu::activate(how.activation, activated.data(), cols);
      for (std::int64_t i = 0; i < cols; ++i) {
        const float by_activated = gradient[index(i)];
        const float up = how.gated ? before[index(cols + i)] : 1.0F;
        result[index(i)] = by_activated * up * slope(how.activation, before[index(i)]);
        if (how.gated) result[index(cols + i)] = by_activated * activated[index(i)];
      }
      core::from_float(result.data(), dtype, hidden_gradient + row * how.hidden_cols() * element,
                       how.hidden_cols());
    }
  });
}

void reduce_rows(cpu::ThreadPool& pool, const MoeRouting& routing, const SendRows& rows,
                 const std::byte* results, std::int64_t cols, DType dtype, bool weighted, std::byte* out,
                 std::int64_t out_ld_bytes) {
  const std::int64_t row_bytes = cols * size_of(dtype);
  in_parallel(pool, cols == 0 ? 0 : routing.tokens, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> sum(index(cols));
    std::vector<float> values(index(cols));
    for (std::int64_t token = begin; token < end; ++token) {
      std::ranges::fill(sum, 0.0F);
      for (std::int32_t slot = 0; slot < routing.top_k; ++slot) {
        const std::int64_t row = rows.row[index(token * routing.top_k + slot)];
        if (row < 0) continue;
        core::to_float(results + row * row_bytes, dtype, values.data(), cols);
        const float weight = weighted ? routing.weight(token, slot) : 1.0F;
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += weight * values[i];
      }
      core::from_float(sum.data(), dtype, out + token * out_ld_bytes, cols);
    }
  });
}

}  // namespace flashoverlap::ops
