#include "cpu/operands.h"

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "core/fail.h"
#include "cpu/blas.h"

namespace flashoverlap::cpu {
namespace {

struct Matrix {
  std::string_view name;
  std::string_view ld_name;
  const void* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t ld = 0;

  [[nodiscard]] bool empty() const { return rows == 0 || cols == 0; }
};

void check_matrix(const Matrix& matrix, const CpuPreparedPlan& prepared) {
  if (matrix.empty()) return;
  const std::int64_t element = size_of(prepared.plan().dtype);
  if (matrix.data == nullptr) {
    core::fail(ErrorKind::kBadArgument, "{} is null; a [{}, {}] matrix is expected ({})", matrix.name,
               matrix.rows, matrix.cols, prepared.label());
  }
  if (reinterpret_cast<std::uintptr_t>(matrix.data) % static_cast<std::uintptr_t>(element) != 0) {
    core::fail(ErrorKind::kBadArgument, "{} is at address {}; {} elements must be aligned to {} bytes ({})",
               matrix.name, matrix.data, name_of(prepared.plan().dtype), element, prepared.label());
  }
  if (matrix.ld < matrix.cols) {
    core::fail(ErrorKind::kBadArgument, "{} is {}; it must be at least the {} columns of {} ({})",
               matrix.ld_name, matrix.ld, matrix.cols, matrix.name, prepared.label());
  }
  if (matrix.ld > kMaxBlasSize) {
    core::fail(ErrorKind::kUnsupported, "{} is {}; the matrix library takes at most {} ({})", matrix.ld_name,
               matrix.ld, kMaxBlasSize, prepared.label());
  }
}

/// Whether two matrices share an element. Exact where both have the same leading dimension (column blocks of
/// one matrix do not overlap although they interleave), otherwise by their extents.
bool overlap(const Matrix& x, const Matrix& y, std::int64_t element) {
  if (x.data == nullptr || y.data == nullptr || x.empty() || y.empty()) return false;
  const auto begin = [](const Matrix& m) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(m.data));
  };
  const auto end = [&](const Matrix& m) { return begin(m) + ((m.rows - 1) * m.ld + m.cols) * element; };
  if (end(x) <= begin(y) || end(y) <= begin(x)) return false;
  if (x.ld != y.ld) return true;
  const std::int64_t ld_bytes = x.ld * element;
  const std::int64_t shift = ((begin(y) - begin(x)) % ld_bytes + ld_bytes) % ld_bytes;
  return shift < x.cols * element || shift + y.cols * element > ld_bytes;
}

void check_apart(const Matrix& written, const Matrix& other, const CpuPreparedPlan& prepared) {
  if (!overlap(written, other, size_of(prepared.plan().dtype))) return;
  core::fail(ErrorKind::kBadArgument,
             "{} [{}, {}] at {} overlaps {} [{}, {}] at {}; they must lie apart ({})", written.name,
             written.rows, written.cols, written.data, other.name, other.rows, other.cols, other.data,
             prepared.label());
}

/// Transfers of the plan move parts of A or B themselves.
void check_dense(const Matrix& matrix, bool arrives, const CpuPreparedPlan& prepared) {
  if (matrix.empty() || matrix.ld == matrix.cols) return;
  core::fail(ErrorKind::kUnsupported, "{} is {}; parts of {} {} other ranks, so it must be dense: {} ({})",
             matrix.ld_name, matrix.ld, matrix.name, arrives ? "arrive from" : "go to", matrix.cols,
             prepared.label());
}

/// Parts of A or B arrive from other ranks: it must be dense, and apart from what is read.
void check_written(const Matrix& matrix, std::initializer_list<const Matrix*> others,
                   const CpuPreparedPlan& prepared) {
  for (const Matrix* other : others) check_apart(matrix, *other, prepared);
  check_dense(matrix, true, prepared);
}

/// A as the caller has it. Without columns in the product it is needed only where it travels.
Matrix input_of(const CpuPreparedPlan& prepared, const Operands& operands) {
  const OverlapPlan& plan = prepared.plan();
  const bool blocks = !plan.input_blocks.empty();
  const std::int64_t rows = blocks ? plan.input_rows : plan.grid.rows();
  const bool needed = plan.grid.cols() > 0 || prepared.moves_input();
  return {"a", "lda", operands.a, needed ? rows : 0, blocks ? plan.input_cols : plan.grid.k(), operands.lda};
}

}  // namespace

void check_operands(const CpuPreparedPlan& prepared, const Operands& operands) {
  const OverlapPlan& plan = prepared.plan();
  const Epilogue& epilogue = operands.epilogue;
  const std::int64_t m = plan.grid.rows();
  const std::int64_t n = plan.grid.cols();
  const std::int64_t k = plan.grid.k();
  const Matrix a = input_of(prepared, operands);
  const bool needs_b = m > 0 || prepared.moves_weight();
  const Matrix b{"b", "ldb", operands.b, needs_b ? n * prepared.num_weights() : 0, k, operands.ldb};
  const Matrix out{"out", "ldo", operands.out, plan.output_rows, plan.output_cols, operands.ldo};
  const auto optional_matrix = [&](std::string_view name, std::string_view ld_name, const void* data,
                                   std::int64_t rows, std::int64_t ld) {
    return Matrix{name, ld_name, data, data == nullptr ? 0 : rows, plan.output_cols, ld};
  };
  const std::int64_t rows = plan.output_rows;
  const Matrix bias = optional_matrix("bias", "", epilogue.bias, 1, plan.output_cols);
  const Matrix norm = optional_matrix("rms_norm_weight", "", epilogue.rms_norm_weight, 1, plan.output_cols);
  const Matrix residual =
      optional_matrix("residual", "residual_ld", epilogue.residual, rows, epilogue.residual_ld);
  const Matrix residual_out = optional_matrix("residual_out", "residual_out_ld", epilogue.residual_out, rows,
                                              epilogue.residual_out_ld);

  for (const Matrix* matrix : {&a, &b, &out, &bias, &norm, &residual, &residual_out})
    check_matrix(*matrix, prepared);
  if (operands.make_rows && prepared.moves_input()) {
    core::fail(ErrorKind::kUnsupported,
               "make_rows is given, but a travels between ranks, so it must be complete at the call ({})",
               prepared.label());
  }
  if (prepared.receives_input()) check_written(a, {&b, &bias, &norm, &residual}, prepared);
  if (prepared.moves_input()) check_dense(a, false, prepared);
  if (prepared.moves_weight()) check_written(b, {&a, &bias, &norm, &residual}, prepared);
  for (const Matrix* other : {&a, &b, &bias, &norm, &residual, &residual_out})
    check_apart(out, *other, prepared);
  for (const Matrix* other : {&a, &b, &bias, &norm}) check_apart(residual_out, *other, prepared);
  // In place is fine: a row is read before it is written.
  const bool in_place = residual_out.data == residual.data && residual_out.ld == residual.ld;
  if (!in_place) check_apart(residual_out, residual, prepared);
}

}  // namespace flashoverlap::cpu
