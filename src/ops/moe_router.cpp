#include <algorithm>

#include "core/fail.h"
#include "core/half.h"
#include "cpu/blas.h"
#include "flashoverlap/moe_router.h"
#include "ops/moe_checks.h"

/// The router's own gradients.
namespace flashoverlap {
namespace {

// Tokens that are converted at a time.
constexpr std::int64_t kTokenBlock = 256;

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

void check(const MoeRouterBackward& call) {
  using ops::at_least;
  at_least("tokens", call.tokens, 0);
  at_least("hidden", call.hidden, 0);
  at_least("num_experts", call.num_experts, 1);
  if (std::ssize(call.logit_gradient) != call.tokens * call.num_experts) {
    core::fail(ErrorKind::kBadArgument, "logit_gradient has {} numbers; {} tokens x {} experts are expected",
               call.logit_gradient.size(), call.tokens, call.num_experts);
  }
  const auto matrix = [&](const char* name, const void* data, std::int64_t ld) {
    at_least(name, ld, call.hidden);
    if (data == nullptr && call.tokens * call.hidden > 0) {
      core::fail(ErrorKind::kBadArgument, "the matrix with {} {} is null", name, ld);
    }
  };
  if (call.gate_gradient != nullptr) matrix("ldx", call.x, call.ldx);
  if (call.input_gradient == nullptr) return;
  matrix("input_ld", call.input_gradient, call.input_ld);
  matrix("gate_ld", call.gate, call.gate_ld);
}

/// Rows [begin, begin + rows) as dense float32.
std::vector<float> float_rows(const void* matrix, std::int64_t ld, std::int64_t begin, std::int64_t rows,
                              std::int64_t cols, DType dtype) {
  std::vector<float> result(index(rows * cols));
  const auto* bytes = static_cast<const std::byte*>(matrix);
  for (std::int64_t row = 0; row < rows; ++row) {
    core::to_float(bytes + (begin + row) * ld * size_of(dtype), dtype, result.data() + row * cols, cols);
  }
  return result;
}

void add_to_input(const MoeRouterBackward& call, const std::vector<float>& gate, std::int64_t begin,
                  std::int64_t rows) {
  const std::int64_t experts = call.num_experts;
  std::vector<float> transposed(index(experts * rows));  // [experts, rows]
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t e = 0; e < experts; ++e) {
      transposed[index(e * rows + row)] = call.logit_gradient[index((begin + row) * experts + e)];
    }
  }
  std::vector<float> sum =
      float_rows(call.input_gradient, call.input_ld, begin, rows, call.hidden, call.dtype);
  cpu::gemm_of_transposed(rows, call.hidden, experts, transposed.data(), rows, gate.data(), call.hidden,
                          sum.data(), call.hidden);
  auto* bytes = static_cast<std::byte*>(call.input_gradient);
  for (std::int64_t row = 0; row < rows; ++row) {
    core::from_float(sum.data() + row * call.hidden, call.dtype,
                     bytes + (begin + row) * call.input_ld * size_of(call.dtype), call.hidden);
  }
}

}  // namespace

void router_backward(const MoeRouterBackward& call) {
  check(call);
  if (call.gate_gradient != nullptr) {
    std::fill_n(call.gate_gradient, call.num_experts * call.hidden, 0.0F);
  }
  if (call.hidden == 0) return;
  std::vector<float> gate;
  if (call.input_gradient != nullptr && call.tokens > 0) {
    gate = float_rows(call.gate, call.gate_ld, 0, call.num_experts, call.hidden, call.dtype);
  }
  const cpu::SingleThreadedBlas single_threaded;  // the same bits whatever the machine
  for (std::int64_t begin = 0; begin < call.tokens; begin += kTokenBlock) {
    const std::int64_t rows = std::min(kTokenBlock, call.tokens - begin);
    if (call.gate_gradient != nullptr) {
      const std::vector<float> x = float_rows(call.x, call.ldx, begin, rows, call.hidden, call.dtype);
      cpu::gemm_of_transposed(call.num_experts, call.hidden, rows,
                              call.logit_gradient.data() + begin * call.num_experts, call.num_experts,
                              x.data(), call.hidden, call.gate_gradient, call.hidden);
    }
    if (call.input_gradient != nullptr) add_to_input(call, gate, begin, rows);
  }
}

}  // namespace flashoverlap
