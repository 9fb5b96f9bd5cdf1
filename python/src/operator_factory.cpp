#include "operator_factory.h"

#include <utility>

#include "core/fail.h"
#include "names.h"

namespace flashoverlap::python {
namespace {

std::unique_ptr<GemmOperator> make_reduce_scatter(Context& context, const GemmOptions& options,
                                                  const OperatorOptions& special) {
  if (special.rows == RowOwnership::kContiguous) {
    return std::make_unique<GemmReduceScatter>(context, options, special.overlap, SliceOptions{},
                                               special.baseline);
  }
  return std::make_unique<GemmReduceScatter>(context, options, special.rows);
}

std::vector<std::int64_t> order_of(const GemmOperator& gemm, const Context& context, std::int64_t size,
                                   SliceAxis axis, const OperatorOptions& special) {
  if (special.baseline.num_slices == 0) return {};
  const TileGrid& grid = gemm.plan(Method::kSliced).grid;
  return sliced_rows(special.slices.rows, size, context.communicator().size(),
                     axis == SliceAxis::kRows ? grid.tile_m() : grid.tile_n(), special.baseline.num_slices);
}

template <typename Gemm>
MadeOperator make_gathering(Context& context, const GemmOptions& options, const OperatorOptions& special,
                            std::int64_t size, SliceAxis axis) {
  auto gemm = std::make_unique<Gemm>(context, options, special.slices.rows, special.baseline);
  MadeOperator made;
  made.gathered = {.first_row = gemm->first_row(), .sliced = order_of(*gemm, context, size, axis, special)};
  made.gemm = std::move(gemm);
  return made;
}

MadeOperator with_rows_from(std::unique_ptr<GemmAllToAll> gemm) {
  MadeOperator made;
  made.rows_from = gemm->rows_from();
  made.gemm = std::move(gemm);
  return made;
}

MadeOperator make_heads(Context& context, const GemmOptions& options, const OperatorOptions& special) {
  MadeOperator made =
      with_rows_from(std::make_unique<GemmAllToAll>(context, options, special.slices, special.baseline));
  made.gathered.sliced = order_of(*made.gemm, context, options.m, SliceAxis::kRows, special);
  return made;
}

MadeOperator plain(std::unique_ptr<GemmOperator> gemm) {
  MadeOperator made;
  made.gemm = std::move(gemm);
  return made;
}

}  // namespace

GemmOptions gemm_options(std::int64_t m, std::int64_t n, std::int64_t k, const std::string& dtype,
                         const std::vector<std::int64_t>& tile, const std::vector<std::int64_t>& partition) {
  GemmOptions options;
  options.m = m;
  options.n = n;
  options.k = k;
  options.dtype = parse_dtype(dtype);
  if (tile.size() >= 2) {
    options.tile_m = tile[0];
    options.tile_n = tile[1];
  }
  if (tile.size() >= 3) options.swizzle = tile[2];
  options.partition = partition;
  return options;
}

HeadSlices slices_of(const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& columns,
                     std::int64_t parts, std::int64_t send_channels) {
  return {.rows = {.sizes = rows, .parts = parts, .send_channels = send_channels},
          .columns = {.sizes = columns, .parts = parts, .send_channels = send_channels}};
}

MadeOperator make_gemm_operator(Context& context, std::string_view name, const GemmOptions& options,
                                const OperatorOptions& special) {
  if (name == "gemm-all-reduce") return plain(std::make_unique<GemmAllReduce>(context, options));
  if (name == "gemm-reduce-scatter") return plain(make_reduce_scatter(context, options, special));
  if (name == "gradient-reduce-scatter") {
    return plain(
        std::make_unique<GradientReduceScatter>(context, options, special.slices.rows, special.baseline));
  }
  if (name == "gemm-all-to-all")
    return with_rows_from(std::make_unique<GemmAllToAll>(context, options, special.destinations));
  if (name == "gemm-all-to-all-heads") return make_heads(context, options, special);
  if (name == "all-to-all-gemm")
    return plain(std::make_unique<AllToAllGemm>(context, options, special.slices, special.baseline));
  if (name == "all-gather-gemm") {
    return make_gathering<AllGatherGemm>(context, options, special, options.m, SliceAxis::kRows);
  }
  if (name == "sharded-weight-gemm") {
    return make_gathering<ShardedWeightGemm>(context, options, special, options.n, SliceAxis::kColumns);
  }
  core::fail(ErrorKind::kInternal, "operator '{}' is not known", name);
}

}  // namespace flashoverlap::python
