#include "ops/random_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "support/ops_call.h"

namespace flashoverlap::test {
namespace {

// Multiply-adds of the reference per rank: it is plain code, and runs under sanitizers too.
constexpr std::int64_t kReferenceBudget = 200'000;

std::int64_t pick(std::mt19937_64& rng, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
}

std::int64_t pick_size(std::mt19937_64& rng, std::int64_t largest) {
  switch (pick(rng, 0, 7)) {
    case 0:
      return pick(rng, 0, 2);
    case 1:
      return pick(rng, 0, largest / 16 + 1);
    case 2:
      return std::min<std::int64_t>(largest, 64 * pick(rng, 1, 4));
    default:
      return pick(rng, 1, largest);
  }
}

Matrix random_matrix(std::mt19937_64& rng, std::int64_t rows, std::int64_t cols, DType dtype) {
  Matrix matrix(rows, cols, dtype, cols + pick(rng, 0, 1) * pick(rng, 0, 9));
  std::uniform_real_distribution<float> uniform(-1, 1);
  matrix.fill([&](auto, auto) { return uniform(rng); });
  return matrix;
}

std::vector<std::int64_t> random_partition(std::mt19937_64& rng, std::int64_t waves) {
  std::vector<std::int64_t> partition;
  while (waves > 0) {
    partition.push_back(pick(rng, 1, pick(rng, 0, 1) == 0 ? waves : std::min<std::int64_t>(waves, 3)));
    waves -= partition.back();
  }
  return partition;
}

std::int64_t waves_of(const RandomCall& call) {
  PlanOptions options{.world_size = call.world_size,
                      .dtype = call.options.dtype,
                      .m = call.options.m,
                      .n = call.options.n,
                      .k = call.options.k,
                      .tile_m = call.options.tile_m,
                      .tile_n = call.options.tile_n,
                      .swizzle = call.options.swizzle,
                      .resources = {.compute_units = call.num_threads, .communication_units = 0},
                      .partition = {}};
  for (const auto& rows : call.destinations) options.m = std::max(options.m, std::ssize(rows));
  return call.kind == OperatorKind::kScatterContiguous
             ? num_waves_reduce_scatter(options, RowOwnership::kContiguous)
             : num_waves(options);
}

/// Rows of every rank: equal, but for all-to-all, where some ranks have none and some send all to one.
void pick_rows(std::mt19937_64& rng, std::int64_t largest, RandomCall& call) {
  call.options.m = pick_size(rng, largest);
  if (call.kind != OperatorKind::kAllToAll) return;
  const auto last = static_cast<std::int32_t>(call.world_size - 1);
  for (int rank = 0; rank < call.world_size; ++rank) {
    const std::int64_t rows = pick(rng, 0, 3) == 0 ? 0 : pick_size(rng, largest);
    const bool to_one = pick(rng, 0, 3) == 0;
    const auto one = static_cast<std::int32_t>(pick(rng, 0, last));
    std::vector<std::int32_t> destinations;
    while (std::ssize(destinations) < rows) {
      const auto to = to_one ? one : static_cast<std::int32_t>(pick(rng, 0, last));
      destinations.insert(destinations.end(), static_cast<std::size_t>(pick(rng, 1, 3)), to);
    }
    destinations.resize(static_cast<std::size_t>(rows));
    call.destinations.push_back(destinations);
  }
  call.options.m = 0;
}

/// The caller's side of the epilogue on one rank.
struct EpilogueMatrices {
  Matrix bias;
  Matrix norm;
  Matrix residual;

  EpilogueMatrices(const RandomCall& call, int rank, std::int64_t rows)
      : EpilogueMatrices(call, std::mt19937_64(call.epilogue_seed + static_cast<std::uint64_t>(rank)), rows) {
  }

  [[nodiscard]] ReferenceEpilogue reference(const RandomCall& call) const {
    return {.bias = call.with_bias ? &bias : nullptr,
            .activation = call.activation,
            .residual = call.with_residual ? &residual : nullptr,
            .rms_norm_weight = call.with_norm ? &norm : nullptr,
            .rms_norm_eps = 1e-3};
  }

 private:
  EpilogueMatrices(const RandomCall& call, std::mt19937_64 rng, std::int64_t rows)
      : bias(random_matrix(rng, 1, call.options.n, call.options.dtype)),
        norm(random_matrix(rng, 1, call.options.n, call.options.dtype)),
        residual(random_matrix(rng, rows, call.options.n, call.options.dtype)) {}
};

struct Result {
  Matrix out;
  Matrix residual_out;
};

Result run(GemmOperator& op, const RandomCall& call, int rank, const EpilogueMatrices& matrices,
           Method method) {
  const RankInputs& inputs = call.inputs[static_cast<std::size_t>(rank)];
  const std::int64_t n = call.options.n;
  Result result{Matrix(op.output_rows(), n, call.options.dtype, n + call.output_padding),
                Matrix(op.output_rows(), n, call.options.dtype, n + call.output_padding / 2)};
  Operands operands = operands_of(inputs.a, inputs.b, result.out);
  Epilogue& epilogue = operands.epilogue;
  epilogue.activation = call.activation;
  epilogue.rms_norm_eps = 1e-3F;
  if (call.with_bias) epilogue.bias = matrices.bias.data();
  if (call.with_norm) epilogue.rms_norm_weight = matrices.norm.data();
  if (call.with_residual) {
    epilogue.residual = matrices.residual.data();
    epilogue.residual_ld = matrices.residual.ld();
  }
  if (call.with_residual_out) {
    epilogue.residual_out = result.residual_out.data();
    epilogue.residual_out_ld = result.residual_out.ld();
  }
  op(operands, method);
  return result;
}

void expect_close(const Matrix& actual, std::int64_t row, const std::vector<Bounded>& expected,
                  const char* what) {
  for (std::size_t j = 0; j < expected.size(); ++j) {
    const double value = actual.at(row, static_cast<std::int64_t>(j));
    ASSERT_LE(std::abs(value - expected[j].value), expected[j].error)
        << what << " row " << row << " column " << j << ": " << value << " instead of " << expected[j].value;
  }
}

void check_row(const Result& result, std::int64_t row, const std::vector<Term>& terms, const RandomCall& call,
               const EpilogueMatrices& matrices) {
  std::vector<Bounded> sums;
  for (std::int64_t col = 0; col < call.options.n; ++col)
    sums.push_back(reference_sum(call.inputs, terms, col));
  const ReferenceRow expected = reference_row(matrices.reference(call), row, sums, call.options.dtype);
  expect_close(result.out, row, expected.out, "out");
  if (call.with_residual_out) expect_close(result.residual_out, row, expected.residual_out, "residual_out");
}

}  // namespace

std::string to_text(const RandomCall& call) {
  std::vector<std::int64_t> rows;
  for (int rank = 0; rank < call.world_size; ++rank) rows.push_back(call.rows_of(rank));
  return fmt::format(
      "operator {} ranks {} threads {} m {} n {} k {} {} tile {}x{} swizzle {} partition [{}] bias {} "
      "activation {} "
      "residual {} residual_out {} norm {} padding {}",
      static_cast<int>(call.kind), call.world_size, call.num_threads, fmt::join(rows, ","), call.options.n,
      call.options.k, name_of(call.options.dtype), call.options.tile_m, call.options.tile_n,
      call.options.swizzle, fmt::join(call.options.partition, ","), call.with_bias, name_of(call.activation),
      call.with_residual, call.with_residual_out, call.with_norm, call.output_padding);
}

RandomCall make_random_call(std::mt19937_64& rng, std::int64_t largest) {
  RandomCall call;
  call.kind = static_cast<OperatorKind>(pick(rng, 0, 3));
  call.world_size = static_cast<int>(pick(rng, 1, 9));
  call.num_threads = static_cast<int>(pick(rng, 1, 4));
  GemmOptions& options = call.options;
  options.n = pick_size(rng, largest);
  options.k = pick_size(rng, largest);
  options.dtype = static_cast<DType>(pick(rng, 0, 2));
  pick_rows(rng, largest, call);
  options.tile_m = pick(rng, 4, 80);
  options.tile_n = pick(rng, 4, 80);
  options.swizzle = pick(rng, 1, 5);
  if (pick(rng, 0, 5) > 0) options.partition = random_partition(rng, waves_of(call));
  for (int rank = 0; rank < call.world_size; ++rank) {
    const std::int64_t rows = call.kind == OperatorKind::kAllToAll
                                  ? std::ssize(call.destinations[static_cast<std::size_t>(rank)])
                                  : options.m;
    call.inputs.push_back({random_matrix(rng, rows, options.k, options.dtype),
                           random_matrix(rng, options.n, options.k, options.dtype)});
  }
  if (pick(rng, 0, 2) > 0) {
    call.with_bias = pick(rng, 0, 1) == 1;
    call.with_residual = pick(rng, 0, 1) == 1;
    call.with_residual_out = pick(rng, 0, 1) == 1;
    call.with_norm = pick(rng, 0, 1) == 1;
    call.activation = static_cast<Activation>(pick(rng, 0, 3));
  }
  call.output_padding = pick(rng, 0, 1) * pick(rng, 0, 9);
  call.epilogue_seed = rng();
  return call;
}

std::unique_ptr<GemmOperator> make_operator(Context& context, const RandomCall& call, int rank) {
  GemmOptions options = call.options;
  options.m = call.rows_of(rank);
  switch (call.kind) {
    case OperatorKind::kAllReduce:
      return std::make_unique<GemmAllReduce>(context, options);
    case OperatorKind::kScatterContiguous:
      return std::make_unique<GemmReduceScatter>(context, options, RowOwnership::kContiguous);
    case OperatorKind::kScatterBlockCyclic:
      return std::make_unique<GemmReduceScatter>(context, options, RowOwnership::kBlockCyclic);
    case OperatorKind::kAllToAll:
      return std::make_unique<GemmAllToAll>(context, options,
                                            call.destinations[static_cast<std::size_t>(rank)]);
  }
  return nullptr;
}

std::vector<std::vector<Term>> output_terms(const RandomCall& call, const OverlapPlan& plan, int rank) {
  std::vector<std::vector<Term>> rows;
  if (call.kind == OperatorKind::kAllToAll) {
    for (std::size_t source = 0; source < call.destinations.size(); ++source) {
      for (std::size_t row = 0; row < call.destinations[source].size(); ++row) {
        if (call.destinations[source][row] != rank) continue;
        rows.push_back({{static_cast<std::int64_t>(source), static_cast<std::int64_t>(row)}});
      }
    }
    return rows;
  }
  std::vector<std::int64_t> owned;
  if (call.kind == OperatorKind::kAllReduce) {
    for (std::int64_t row = 0; row < call.options.m; ++row) owned.push_back(row);
  } else {
    const bool contiguous = call.kind == OperatorKind::kScatterContiguous;
    owned = owned_rows(call.options.m, plan.grid.tile_m(), call.world_size, rank,
                       contiguous ? RowOwnership::kContiguous : RowOwnership::kBlockCyclic);
  }
  for (const std::int64_t row : owned) {
    rows.emplace_back();
    for (std::int64_t source = 0; source < call.world_size; ++source) rows.back().push_back({source, row});
  }
  return rows;
}

void check_call(GemmOperator& op, const RandomCall& call, int rank) {
  const std::vector<std::vector<Term>> terms = output_terms(call, op.plan(), rank);
  const auto rows = std::ssize(terms);
  ASSERT_EQ(op.output_rows(), rows);
  const EpilogueMatrices matrices(call, rank, rows);
  const Result serial = run(op, call, rank, matrices, Method::kSerial);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const Result overlapped = run(op, call, rank, matrices, Method::kOverlap);
    EXPECT_TRUE(overlapped.out == serial.out) << "overlapped and serial differ on rank " << rank;
    EXPECT_TRUE(overlapped.residual_out == serial.residual_out) << "residual_out differs on rank " << rank;
  }
  EXPECT_TRUE(serial.out.guards_intact());
  EXPECT_TRUE(call.with_residual_out ? serial.residual_out.guards_intact() : serial.residual_out.untouched());
  const std::int64_t row_cost = std::max<std::int64_t>(1, call.options.n * call.options.k * call.world_size);
  const std::int64_t step = std::max<std::int64_t>(1, rows * row_cost / kReferenceBudget);
  for (std::int64_t row = rank % step; row < rows; row += step) {
    check_row(serial, row, terms[static_cast<std::size_t>(row)], call, matrices);
  }
}

}  // namespace flashoverlap::test
