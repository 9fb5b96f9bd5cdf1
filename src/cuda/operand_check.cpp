#include "operand_check.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string_view>

#include "check.h"
#include "core/fail.h"

namespace flashoverlap::cuda {
namespace {

struct Matrix {
  std::string_view name;
  const void* data;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t ld;
  [[nodiscard]] bool is_empty() const { return rows == 0 || cols == 0; }
  [[nodiscard]] std::int64_t bytes(DType dtype) const {
    return is_empty() ? 0 : ((rows - 1) * ld + cols) * size_of(dtype);
  }
};

void check_address(const OverlapPlan& plan, const Matrix& matrix, int device) {
  if (matrix.data == nullptr) {
    core::fail(ErrorKind::kBadArgument, "{}: {} is null, expected {} x {} elements of {} on device {}",
               plan.operation, matrix.name, matrix.rows, matrix.cols, name_of(plan.dtype), device);
  }
  if (reinterpret_cast<std::uintptr_t>(matrix.data) % static_cast<std::uintptr_t>(size_of(plan.dtype)) != 0) {
    core::fail(ErrorKind::kBadArgument, "{}: {} at {} is not aligned to its elements of {} bytes",
               plan.operation, matrix.name, matrix.data, size_of(plan.dtype));
  }
  cudaPointerAttributes attributes{};
  FLASHOVERLAP_CUDA_CHECK(cudaPointerGetAttributes(&attributes, matrix.data));
  if (attributes.type == cudaMemoryTypeUnregistered || attributes.type == cudaMemoryTypeHost) {
    core::fail(ErrorKind::kBadArgument, "{}: {} at {} is host memory, expected memory of device {}",
               plan.operation, matrix.name, matrix.data, device);
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
    core::fail(ErrorKind::kBadArgument, "{}: {} at {} is on device {}, expected device {}", plan.operation,
               matrix.name, matrix.data, attributes.device, device);
  }
}

void check_matrix(const OverlapPlan& plan, const Matrix& matrix, int device) {
  if (matrix.is_empty()) return;
  if (matrix.ld < matrix.cols) {
    core::fail(ErrorKind::kBadArgument,
               "{}: the leading dimension of {} is {}, must be at least its row length {}", plan.operation,
               matrix.name, matrix.ld, matrix.cols);
  }
  check_address(plan, matrix, device);
}

void check_apart(const OverlapPlan& plan, const Matrix& out, const Matrix& in) {
  if (out.is_empty() || in.is_empty()) return;
  const auto* const out_begin = static_cast<const char*>(out.data);
  const auto* const in_begin = static_cast<const char*>(in.data);
  if (out_begin < in_begin + in.bytes(plan.dtype) && in_begin < out_begin + out.bytes(plan.dtype)) {
    core::fail(ErrorKind::kBadArgument, "{}: {} at {} overlaps {} at {}", plan.operation, out.name, out.data,
               in.name, in.data);
  }
}

// Transfers of the plan land in A or B themselves, or leave from there.
void check_written(const OverlapPlan& plan, const Matrix& matrix, const Matrix& other) {
  check_apart(plan, matrix, other);
  if (matrix.is_empty() || matrix.ld == matrix.cols) return;
  core::fail(
      ErrorKind::kUnsupported,
      "{}: the leading dimension of {} is {}; parts of it travel between ranks, so it must be dense: {}",
      plan.operation, matrix.name, matrix.ld, matrix.cols);
}

}  // namespace

bool is_moved(const OverlapPlan& plan, BufferKind buffer) {
  return std::any_of(plan.transfers.begin(), plan.transfers.end(), [&](const Transfer& transfer) {
    return transfer.source.buffer == buffer || transfer.destination.buffer == buffer;
  });
}

void check_operands(const OverlapPlan& plan, const Operands& operands, int device) {
  const std::int64_t rows = plan.output_rows;
  const std::int64_t n = plan.output_cols;
  const bool has_blocks = plan.input_rows > 0;
  const Matrix a{"a", operands.a, has_blocks ? plan.input_rows : plan.grid.rows(),
                 has_blocks ? plan.input_cols : plan.grid.k(), operands.lda};
  const Matrix b{"b", operands.b, plan.grid.cols(), plan.grid.k(), operands.ldb};
  const Matrix out{"out", operands.out, rows, n, operands.ldo};
  check_matrix(plan, a, device);
  check_matrix(plan, b, device);
  check_matrix(plan, out, device);
  check_apart(plan, out, a);
  check_apart(plan, out, b);
  if (is_moved(plan, BufferKind::kInput)) check_written(plan, a, b);
  if (is_moved(plan, BufferKind::kWeight)) check_written(plan, b, a);
  const Epilogue& e = operands.epilogue;
  const auto optional = [&](const Matrix& matrix) {
    if (matrix.data != nullptr) check_matrix(plan, matrix, device);
  };
  optional({"epilogue.bias", e.bias, 1, n, n});
  optional({"epilogue.residual", e.residual, rows, n, e.residual_ld});
  optional({"epilogue.residual_out", e.residual_out, rows, n, e.residual_out_ld});
  optional({"epilogue.rms_norm_weight", e.rms_norm_weight, 1, n, n});
}

}  // namespace flashoverlap::cuda
