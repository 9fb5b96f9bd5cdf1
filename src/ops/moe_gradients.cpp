#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/half.h"
#include "cpu/blas.h"
#include "cpu/epilogue.h"
#include "ops/moe_passes.h"

/// The backward half of the passes.
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

// Rows that are converted at a time for 16-bit types.
constexpr std::int64_t kRowBlock = 128;
// Columns of `left` that one task computes the products of.
constexpr std::int64_t kColBlock = 128;

/// Rows [begin, begin + rows) x cols [col, col + cols) of a dense matrix as float32: itself, or a copy in
/// `scratch`.
struct FloatBlock {
  const float* data = nullptr;
  std::int64_t ld = 0;
};
FloatBlock float_block(const std::byte* matrix, std::int64_t ld, std::int64_t begin, std::int64_t rows,
                       std::int64_t col, std::int64_t cols, DType dtype, std::vector<float>& scratch) {
  if (dtype == DType::kFloat32) return {reinterpret_cast<const float*>(matrix) + begin * ld + col, ld};
  scratch.resize(index(rows * cols));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::byte* from = matrix + ((begin + row) * ld + col) * size_of(dtype);
    core::to_float(from, dtype, scratch.data() + row * cols, cols);
  }
  return {scratch.data(), cols};
}

}  // namespace

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

void weight_gradient(cpu::ThreadPool& pool, const MoeRouting& routing, const SendRows& rows,
                     const std::byte* results, const RowsView& out_gradient, std::int64_t cols, DType dtype,
                     float* gradient) {
  const std::int64_t row_bytes = cols * size_of(dtype);
  in_parallel(pool, routing.tokens, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> left(index(cols));
    std::vector<float> right(index(cols));
    for (std::int64_t token = begin; token < end; ++token) {
      if (cols > 0)
        core::to_float(out_gradient.data + token * out_gradient.ld_bytes, dtype, left.data(), cols);
      for (std::int32_t slot = 0; slot < routing.top_k; ++slot) {
        const std::int64_t at = token * routing.top_k + slot;
        double sum = 0;
        if (const std::int64_t row = rows.row[index(at)]; row >= 0 && cols > 0) {
          core::to_float(results + row * row_bytes, dtype, right.data(), cols);
          for (std::size_t i = 0; i < left.size(); ++i) {
            sum += static_cast<double>(left[i]) * static_cast<double>(right[i]);
          }
        }
        gradient[at] = static_cast<float>(sum);
      }
    }
  });
}

void transpose_stack(cpu::ThreadPool& pool, std::int64_t count, std::int64_t rows, std::int64_t cols,
                     DType dtype, const std::byte* from, std::byte* to) {
  const auto transpose = [&]<typename Element>(Element) {
    const auto* source = reinterpret_cast<const Element*>(from);
    auto* target = reinterpret_cast<Element*>(to);
    constexpr std::int64_t kBlock = 32;  // both sides of a block stay in the first-level cache
    in_parallel(pool, count * rows, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; row += kBlock) {
        const std::int64_t last_row = std::min(row + kBlock, end);
        for (std::int64_t col = 0; col < cols; col += kBlock) {
          for (std::int64_t r = row; r < last_row; ++r) {
            Element* const matrix = target + r / rows * rows * cols;
            for (std::int64_t c = col; c < std::min(col + kBlock, cols); ++c) {
              matrix[c * rows + r % rows] = source[r * cols + c];
            }
          }
        }
      }
    });
  };
  if (size_of(dtype) == 4) {
    transpose(std::uint32_t{});
  } else {
    transpose(std::uint16_t{});
  }
}

void expert_products(cpu::ThreadPool& pool, const MoeLayout& layout, std::int64_t first_expert,
                     std::int64_t num_experts, DType dtype, const std::byte* left, std::int64_t left_cols,
                     const std::byte* right, std::int64_t right_cols, float* to) {
  if (left_cols == 0 || right_cols == 0) return;
  std::vector<std::vector<MoeGroup>> groups(index(num_experts));
  for (const MoeGroup& group : layout.groups) groups[index(group.expert - first_expert)].push_back(group);
  const std::int64_t blocks = (left_cols + kColBlock - 1) / kColBlock;
  const cpu::SingleThreadedBlas single_threaded;
  in_parallel(pool, num_experts * blocks, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> left_scratch;
    std::vector<float> right_scratch;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t col = task % blocks * kColBlock;
      const std::int64_t cols = std::min(kColBlock, left_cols - col);
      float* target = to + (task / blocks * left_cols + col) * right_cols;
      std::fill_n(target, cols * right_cols, 0.0F);
      for (const MoeGroup& group : groups[index(task / blocks)]) {
        for (std::int64_t row = 0; row < group.rows; row += kRowBlock) {
          const std::int64_t rows = std::min(kRowBlock, group.rows - row);
          const FloatBlock a =
              float_block(left, left_cols, group.row_begin + row, rows, col, cols, dtype, left_scratch);
          const FloatBlock b = float_block(right, right_cols, group.row_begin + row, rows, 0, right_cols,
                                           dtype, right_scratch);
          cpu::gemm_of_transposed(cols, right_cols, rows, a.data, a.ld, b.data, b.ld, target, right_cols);
        }
      }
    }
  });
}

}  // namespace flashoverlap::ops
