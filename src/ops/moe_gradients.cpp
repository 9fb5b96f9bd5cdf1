#include "ops/moe_gradients.h"

#include <algorithm>
#include <span>

#include "core/half.h"
#include "cpu/blas.h"

namespace flashoverlap::ops {
namespace {

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// Rows that one step multiplies, and columns of `left` that one sequence computes the products of: about a
// tile's work.
constexpr std::int64_t kRowBlock = 128;
constexpr std::int64_t kColBlock = 128;
// Bytes that a step of a pass over memory reads: far less than a tile's time.
constexpr std::int64_t kPassBytes = 256 * 1024;

/// Where a plan's slices lie in A, by row.
class SliceRows {
 public:
  explicit SliceRows(const OverlapPlan& plan) {
    const std::int64_t k = plan.grid.k();
    for (std::int64_t s = 0; k > 0 && s < std::ssize(plan.slices); ++s) {
      const Region& region = plan.slices[index(s)].region;
      if (region.count == 0) continue;
      rows_.push_back({region.offset / k, (region.offset + region.count) / k, s});
    }
    std::ranges::sort(rows_, {}, &Rows::begin);
  }

  /// Appends those that have some of rows [begin, end).
  void append(std::int64_t begin, std::int64_t end, std::vector<std::int64_t>& slices) const {
    auto it = std::ranges::partition_point(rows_, [&](const Rows& rows) { return rows.end <= begin; });
    for (; it != rows_.end() && it->begin < end; ++it) slices.push_back(it->slice);
  }

 private:
  struct Rows {
    std::int64_t begin;
    std::int64_t end;
    std::int64_t slice;
  };
  std::vector<Rows> rows_;
};

/// Rows [begin, begin + rows) x cols [col, col + cols) of a dense matrix as float32: itself, or a copy in
/// `scratch`.
struct FloatBlock {
  const float* data = nullptr;
  std::int64_t ld = 0;
};
FloatBlock float_block(const RowsMatrix& matrix, const ExpertRows::Step& step, std::int64_t col,
                       std::int64_t cols, DType dtype, std::vector<float>& scratch) {
  const std::int64_t ld = matrix.cols;
  if (dtype == DType::kFloat32) {
    return {reinterpret_cast<const float*>(matrix.data) + step.row_begin * ld + col, ld};
  }
  scratch.resize(std::max(scratch.size(), index(step.rows * cols)));
  for (std::int64_t row = 0; row < step.rows; ++row) {
    const std::byte* from = matrix.data + ((step.row_begin + row) * ld + col) * size_of(dtype);
    core::to_float(from, dtype, scratch.data() + row * cols, cols);
  }
  return {scratch.data(), cols};
}

template <typename Element>
void transpose_rows(std::int64_t begin, std::int64_t end, std::int64_t rows, std::int64_t cols,
                    const std::byte* from, std::byte* to) {
  const auto* source = reinterpret_cast<const Element*>(from);
  auto* target = reinterpret_cast<Element*>(to);
  constexpr std::int64_t kBlock = 32;  // both sides of a block stay in the first-level cache
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
}

/// Sequences of one step each for pieces [begin, end) of [0, count), which read `bytes` for each item.
template <typename Function>
void add_pieces(WorkList& work, std::int64_t count, std::int64_t bytes, const Function& function) {
  const std::int64_t piece = std::max<std::int64_t>(1, kPassBytes / std::max<std::int64_t>(1, bytes));
  for (std::int64_t begin = 0; begin < count; begin += piece) {
    const std::int64_t end = std::min(begin + piece, count);
    work.add(
        {.num_steps = 1, .run = [=](std::int64_t, WorkScratch& scratch) { function(begin, end, scratch); }});
  }
}

}  // namespace

ExpertRows expert_rows(const MoeLayout& layout, const OverlapPlan& dispatch, std::int64_t first_expert,
                       std::int64_t num_experts) {
  std::vector<MoeGroup> groups = layout.groups;
  std::ranges::stable_sort(groups, {}, [&](const MoeGroup& group) {
    return (dispatch.rank - group.owner + dispatch.world_size) % dispatch.world_size;
  });
  const SliceRows slice_rows(dispatch);
  ExpertRows result;
  result.experts.resize(index(num_experts));
  for (const MoeGroup& group : groups) {
    for (std::int64_t row = 0; row < group.rows; row += kRowBlock) {
      ExpertRows::Step step{.row_begin = group.row_begin + row,
                            .rows = std::min(kRowBlock, group.rows - row),
                            .first_slice = result.slices.size()};
      slice_rows.append(step.row_begin, step.row_begin + step.rows, result.slices);
      step.num_slices = result.slices.size() - step.first_slice;
      result.experts[index(group.expert - first_expert)].push_back(step);
    }
  }
  return result;
}

void add_transposes(WorkList& work, std::int64_t count, std::int64_t rows, std::int64_t cols, DType dtype,
                    const std::byte* from, std::byte* to) {
  const std::int64_t element = size_of(dtype);
  add_pieces(work, count * rows, cols * element, [=](std::int64_t begin, std::int64_t end, WorkScratch&) {
    if (element == 4) {
      transpose_rows<std::uint32_t>(begin, end, rows, cols, from, to);
    } else {
      transpose_rows<std::uint16_t>(begin, end, rows, cols, from, to);
    }
  });
}

void add_weight_gradient(WorkList& work, const MoeRouting& routing, const SendRows& rows,
                         const std::byte* results, const RowsView& out_gradient, std::int64_t cols,
                         DType dtype, float* gradient) {
  const std::int64_t row_bytes = cols * size_of(dtype);
  const auto dot = [=](const float* left, const float* right) {
    double sum = 0;
    for (std::int64_t i = 0; i < cols; ++i) {
      sum += static_cast<double>(left[i]) * static_cast<double>(right[i]);
    }
    return sum;
  };
  const auto of_tokens = [=, &routing, &rows](std::int64_t begin, std::int64_t end, WorkScratch& scratch) {
    scratch.left.resize(std::max(scratch.left.size(), index(cols)));
    scratch.right.resize(std::max(scratch.right.size(), index(cols)));
    for (std::int64_t token = begin; token < end; ++token) {
      if (cols > 0) {
        core::to_float(out_gradient.data + token * out_gradient.ld_bytes, dtype, scratch.left.data(), cols);
      }
      for (std::int64_t at = token * routing.top_k; at < (token + 1) * routing.top_k; ++at) {
        const std::int64_t row = rows.row[index(at)];
        gradient[at] = 0;
        if (row < 0 || cols == 0) continue;
        core::to_float(results + row * row_bytes, dtype, scratch.right.data(), cols);
        gradient[at] = static_cast<float>(dot(scratch.left.data(), scratch.right.data()));
      }
    }
  };
  add_pieces(work, routing.tokens, row_bytes * (routing.top_k + 1), of_tokens);
}

void add_expert_products(WorkList& work, const ExpertRows& rows, bool wait, DType dtype,
                         const RowsMatrix& left, const RowsMatrix& right, float* to) {
  if (left.cols == 0 || right.cols == 0) return;
  for (std::int64_t expert = 0; expert < std::ssize(rows.experts); ++expert) {
    const std::vector<ExpertRows::Step>& steps = rows.experts[index(expert)];
    for (std::int64_t col = 0; col < left.cols; col += kColBlock) {
      const std::int64_t cols = std::min(kColBlock, left.cols - col);
      float* const target = to + (expert * left.cols + col) * right.cols;
      const auto run = [=, &steps](std::int64_t number, WorkScratch& scratch) {
        if (number == 0) std::fill_n(target, cols * right.cols, 0.0F);
        if (steps.empty()) return;
        const ExpertRows::Step& step = steps[index(number)];
        const FloatBlock a = float_block(left, step, col, cols, dtype, scratch.left);
        const FloatBlock b = float_block(right, step, 0, right.cols, dtype, scratch.right);
        cpu::gemm_of_transposed(cols, right.cols, step.rows, a.data, a.ld, b.data, b.ld, target, right.cols);
      };
      WorkList::Sequence sequence{.num_steps = std::max<std::int64_t>(1, std::ssize(steps)), .run = run};
      if (wait && !steps.empty()) {
        sequence.slices = [&rows, &steps](std::int64_t number) {
          const ExpertRows::Step& step = steps[index(number)];
          return std::span(rows.slices).subspan(step.first_slice, step.num_slices);
        };
      }
      work.add(std::move(sequence));
    }
  }
}

}  // namespace flashoverlap::ops
