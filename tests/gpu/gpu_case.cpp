#include "gpu_case.h"

#include <algorithm>
#include <mutex>

#include "gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// As the operator would be cut with a partition of its own: see Case::leaves_partition_open.
std::vector<std::int64_t> partition_of(Rank& rank, const Case& call) {
  if (!call.gemm.partition.empty() || call.leaves_partition_open) return call.gemm.partition;
  PlanOptions options;
  options.world_size = rank.world_size;
  options.dtype = call.gemm.dtype;
  options.m = call.gemm.m;
  for (int r = 0; call.op == Op::kAllToAll && r < rank.world_size; ++r)
    options.m = std::max(r == 0 ? 0 : options.m, call.m_of(r));
  options.n = call.gemm.n;
  options.k = call.gemm.k;
  const PlanShape shape = *rank.context->executor().suggest(
      {.m = options.m, .n = options.n, .k = options.k, .dtype = options.dtype});
  options.tile_m = call.gemm.tile_m == 0 ? shape.tile_m : call.gemm.tile_m;
  options.tile_n = call.gemm.tile_n == 0 ? shape.tile_n : call.gemm.tile_n;
  options.resources = shape.resources;
  return default_partition(call.op == Op::kReduceScatter ? num_waves_reduce_scatter(options, call.rows)
                                                         : num_waves(options));
}

std::unique_ptr<GemmOperator> make_operator(Rank& rank, const Case& call) {
  GemmOptions options = call.gemm;
  options.m = call.m_of(rank.rank);
  options.partition = partition_of(rank, call);
  switch (call.op) {
    case Op::kAllReduce:
      return std::make_unique<GemmAllReduce>(*rank.context, options);
    case Op::kReduceScatter:
      return std::make_unique<GemmReduceScatter>(*rank.context, options, call.rows);
    case Op::kAllToAll:
      return std::make_unique<GemmAllToAll>(*rank.context, options, call.destinations[index(rank.rank)]);
  }
  return nullptr;
}

std::int64_t exact_limit(DType dtype) {
  return dtype == DType::kFloat16 ? 2048 : 256;
}

}  // namespace

const char* name_of(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "all-reduce";
    case Op::kReduceScatter:
      return "reduce-scatter";
    case Op::kAllToAll:
      return "all-to-all";
  }
  return "?";
}

std::int64_t Case::m_of(int rank) const {
  return op == Op::kAllToAll ? std::ssize(destinations[index(rank)]) : gemm.m;
}

std::string Case::text() const {
  std::ostringstream text;
  text << name_of(op) << " m=" << gemm.m << " n=" << gemm.n << " k=" << gemm.k << " "
       << flashoverlap::name_of(gemm.dtype) << " tile " << gemm.tile_m << "x" << gemm.tile_n << " swizzle "
       << gemm.swizzle << " seed " << seed << " padding " << padding << (with_epilogue ? " epilogue" : "")
       << " partition";
  for (const std::int64_t waves : gemm.partition) text << " " << waves;
  if (op == Op::kReduceScatter) text << " rows " << flashoverlap::name_of(rows);
  if (op == Op::kAllToAll) {
    for (const auto& rank : destinations) text << " rows " << rank.size();
  }
  return text.str();
}

std::int32_t bias_value(std::int64_t col) {
  return static_cast<std::int32_t>(col % 7 - 3);
}

std::int32_t residual_value(int rank, std::int64_t row, std::int64_t col) {
  return static_cast<std::int32_t>((row * 5 + col * 3 + rank) % 11 - 5);
}

Expected expected_of(const Case& call, int world_size, std::int64_t tile_m) {
  const std::int64_t n = call.gemm.n;
  const std::int64_t k = call.gemm.k;
  std::vector<std::vector<std::int32_t>> products;
  for (int r = 0; r < world_size; ++r) {
    const std::int64_t m = call.m_of(r);
    products.push_back(multiply(known_a(call.seed + r, m, k), known_b(call.seed + r, n, k), m, n, k));
  }
  const std::int64_t limit = exact_limit(call.gemm.dtype);
  const auto require_exact = [&](std::int32_t value) {
    GPU_EXPECT(std::abs(value) <= limit,
               "the test's own data is not exact: " << value << " in " << call.text());
    return value;
  };
  Expected expected;
  const auto add_row = [&](int rank, std::vector<std::int32_t>& out, const std::vector<std::int32_t>& sums) {
    const std::int64_t row = std::ssize(out) / std::max<std::int64_t>(n, 1);
    for (std::int64_t j = 0; j < n; ++j) {
      std::int32_t value = sums[index(j)];
      if (call.with_epilogue) value = std::max(value + bias_value(j), 0) + residual_value(rank, row, j);
      out.push_back(require_exact(value));
    }
  };
  const auto sum_of_row = [&](std::int64_t row) {
    std::vector<std::int32_t> sums(index(n), 0);
    for (const auto& product : products) {
      for (std::int64_t j = 0; j < n; ++j) {
        require_exact(product[index(row * n + j)]);
        sums[index(j)] = require_exact(sums[index(j)] + product[index(row * n + j)]);
      }
    }
    return sums;
  };
  for (int r = 0; r < world_size; ++r) {
    std::vector<std::int32_t> out;
    if (call.op == Op::kAllReduce) {
      for (std::int64_t row = 0; row < call.gemm.m; ++row) add_row(r, out, sum_of_row(row));
    } else if (call.op == Op::kReduceScatter) {
      for (const std::int64_t row : owned_rows(call.gemm.m, tile_m, world_size, r, call.rows))
        add_row(r, out, sum_of_row(row));
    } else {
      for (int from = 0; from < world_size; ++from) {
        for (std::int64_t row = 0; row < call.m_of(from); ++row) {
          if (call.destinations[index(from)][index(row)] != r) continue;
          const auto begin = products[index(from)].begin() + row * n;
          add_row(r, out, std::vector<std::int32_t>(begin, begin + n));
        }
      }
    }
    expected.out.push_back(std::move(out));
  }
  expected.residual_out = expected.out;
  return expected;
}

RankCall::RankCall(Rank& rank, const Case& call)
    : rank_(rank),
      call_(call),
      op_(make_operator(rank, call)),
      a_(call.m_of(rank.rank), call.gemm.k, call.gemm.k + call.padding, call.gemm.dtype),
      b_(call.gemm.n, call.gemm.k, call.gemm.k + call.padding, call.gemm.dtype),
      out_(op_->output_rows(), call.gemm.n, call.gemm.n + call.padding, call.gemm.dtype),
      bias_(1, call.gemm.n, call.gemm.n, call.gemm.dtype),
      residual_(op_->output_rows(), call.gemm.n, call.gemm.n + call.padding, call.gemm.dtype),
      residual_out_(op_->output_rows(), call.gemm.n, call.gemm.n + call.padding, call.gemm.dtype) {
  refill(call.seed);
  operands_ = {.a = a_.data(),
               .lda = a_.ld(),
               .b = b_.data(),
               .ldb = b_.ld(),
               .out = out_.data(),
               .ldo = out_.ld(),
               .epilogue = {},
               .stream = rank.native_stream()};
  if (!call.with_epilogue) return;
  Integers bias;
  Integers residual;
  for (std::int64_t j = 0; j < call.gemm.n; ++j) bias.push_back(static_cast<std::int16_t>(bias_value(j)));
  for (std::int64_t i = 0; i < op_->output_rows(); ++i) {
    for (std::int64_t j = 0; j < call.gemm.n; ++j) {
      residual.push_back(static_cast<std::int16_t>(residual_value(rank.rank, i, j)));
    }
  }
  bias_.fill(bias);
  residual_.fill(residual);
  operands_.epilogue = {.bias = bias_.data(),
                        .activation = Activation::kRelu,
                        .residual = residual_.data(),
                        .residual_ld = residual_.ld(),
                        .residual_out = residual_out_.data(),
                        .residual_out_ld = residual_out_.ld()};
}

void RankCall::refill(std::int64_t seed) {
  a_.fill(known_a(seed + rank_.rank, a_.rows(), a_.cols()));
  b_.fill(known_b(seed + rank_.rank, b_.rows(), b_.cols()));
}

void RankCall::poison() {
  out_.poison();
  residual_out_.poison();
}

void RankCall::enqueue(Method method) {
  op_->run(operands_, method, Mode::kRun, nullptr);
}

void RankCall::run_and_check(const Expected& expected, Method method) {
  poison();
  enqueue(method);
  rank_.stream->synchronize();
  check(expected, method == Method::kSerial ? "serial" : "overlapped");
}

void RankCall::check(const Expected& expected, const std::string& what) {
  const auto compare = [&](const DeviceMatrix& matrix, const std::vector<std::int32_t>& values,
                           const char* name) {
    const std::vector<float> got = matrix.read();
    GPU_EXPECT(got.size() == values.size(),
               name << " has " << got.size() << " elements, expected " << values.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (got[i] == static_cast<float>(values[i])) continue;
      const std::int64_t at = static_cast<std::int64_t>(i);
      std::size_t wrong = 0;
      for (std::size_t j = 0; j < got.size(); ++j) wrong += got[j] != static_cast<float>(values[j]) ? 1U : 0U;
      GPU_EXPECT(false, what << ", rank " << rank_.rank << ": " << name << "[" << at / matrix.cols() << ", "
                             << at % matrix.cols() << "] is " << got[i] << ", expected " << values[i] << " ("
                             << wrong << " of " << got.size() << " wrong); " << call_.text());
    }
  };
  compare(out_, expected.out[index(rank_.rank)], "out");
  if (call_.with_epilogue) compare(residual_out_, expected.residual_out[index(rank_.rank)], "residual_out");
}

void run_case(Group& group, const Case& call) {
  std::once_flag once;
  Expected expected;
  group.run([&](Rank& rank) {
    RankCall own(rank, call);
    std::call_once(once,
                   [&] { expected = expected_of(call, rank.world_size, own.op().plan().grid.tile_m()); });
    own.run_and_check(expected, Method::kOverlap);
    own.run_and_check(expected, Method::kSerial);
    // Again, on tables and counters as the first call left them.
    own.run_and_check(expected, Method::kOverlap);
  });
}

}  // namespace flashoverlap::gpu_test
