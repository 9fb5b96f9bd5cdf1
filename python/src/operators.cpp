#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "array.h"
#include "bindings.h"
#include "context.h"
#include "core/fail.h"
#include "flashoverlap/operators.h"
#include "gpu.h"
#include "names.h"

namespace flashoverlap::python {
namespace {

/// Keeps the context for as long as the operator, which works in it.
struct Operator {
  std::shared_ptr<GuardedContext> context;
  std::unique_ptr<GemmOperator> gemm;
  std::vector<std::int64_t> rows_from;  ///< All-to-all only.
  std::int64_t first_row = 0;           ///< Of this rank's slice of a matrix that is gathered.

  Operator(std::shared_ptr<GuardedContext> context_, std::unique_ptr<GemmOperator> gemm_)
      : context(std::move(context_)), gemm(std::move(gemm_)) {}
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;
  ~Operator() {
    const nb::gil_scoped_release release;
    gemm.reset();
    context.reset();
  }
};

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

/// What only some operators have.
struct Special {
  RowOwnership rows = RowOwnership::kContiguous;
  OverlapMethod overlap = OverlapMethod::kSignal;
  std::vector<std::int32_t> destinations;
  SliceOptions slices;   ///< Rows of each rank, of the matrix that is spread over them.
  SliceOptions columns;  ///< Along heads.
};

void make_reduce_scatter(Operator& made, const GemmOptions& options, const Special& special) {
  Context& context = made.context->context;
  if (special.rows == RowOwnership::kContiguous) {
    made.gemm = std::make_unique<GemmReduceScatter>(context, options, special.overlap);
  } else {
    made.gemm = std::make_unique<GemmReduceScatter>(context, options, special.rows);
  }
}

template <typename Gemm>
void make_gathering(Operator& made, const GemmOptions& options, const Special& special) {
  auto gemm = std::make_unique<Gemm>(made.context->context, options, special.slices);
  made.first_row = gemm->first_row();
  made.gemm = std::move(gemm);
}

template <typename Routing>
void make_all_to_all(Operator& made, const GemmOptions& options, const Routing& routing) {
  auto gemm = std::make_unique<GemmAllToAll>(made.context->context, options, routing);
  made.rows_from = gemm->rows_from();
  made.gemm = std::move(gemm);
}

void make_in_context(Operator& made, std::string_view name, const GemmOptions& options,
                     const Special& special) {
  if (name == "gemm-all-reduce") {
    made.gemm = std::make_unique<GemmAllReduce>(made.context->context, options);
  } else if (name == "gemm-reduce-scatter") {
    make_reduce_scatter(made, options, special);
  } else if (name == "gradient-reduce-scatter") {
    made.gemm = std::make_unique<GradientReduceScatter>(made.context->context, options, special.slices);
  } else if (name == "gemm-all-to-all") {
    make_all_to_all(made, options, special.destinations);
  } else if (name == "gemm-all-to-all-heads") {
    make_all_to_all(made, options, HeadSlices{.rows = special.slices, .columns = special.columns});
  } else if (name == "all-to-all-gemm") {
    made.gemm = std::make_unique<AllToAllGemm>(
        made.context->context, options, HeadSlices{.rows = special.slices, .columns = special.columns});
  } else if (name == "all-gather-gemm") {
    make_gathering<AllGatherGemm>(made, options, special);
  } else if (name == "sharded-weight-gemm") {
    make_gathering<ShardedWeightGemm>(made, options, special);
  } else {
    core::fail(ErrorKind::kInternal, "operator '{}' is not known", name);
  }
}

std::unique_ptr<Operator> make_gemm(const std::shared_ptr<GuardedContext>& context, const std::string& name,
                                    const GemmOptions& options, const Special& special) {
  auto made = std::make_unique<Operator>(context, nullptr);
  const nb::gil_scoped_release release;
  const auto lock = context->enter();
  make_in_context(*made, name, options, special);
  return made;
}

/// The optional arrays of an epilogue, row-major.
struct EpilogueInputs {
  RowMajorInput bias;
  RowMajorInput residual;
  RowMajorInput rms_norm_weight;
};

/// The executor compares what it is given; of copies it cannot know what they were copied from.
void require_apart(const RowMajorInput& input, const Array* array,
                   std::initializer_list<const Array*> written) {
  if (!input.is_copy()) return;
  for (const Array* other : written) {
    if (other != nullptr && other->overlaps(*array)) {
      core::fail(ErrorKind::kBadArgument, "{} overlaps {}; they must lie apart", other->description(),
                 array->description());
    }
  }
}

void run(Operator& self, const Array& a, const Array& b, const Array& out, const Array* bias,
         const std::string& activation, const Array* residual, const Array* residual_out,
         const Array* rms_norm_weight, double rms_norm_eps, const std::string& method, std::uintptr_t stream,
         Timeline* timeline) {
  const nb::gil_scoped_release release;
  for (const Array* array : {&a, &b, &out, bias, residual, residual_out, rms_norm_weight}) {
    require_device(array, self.context->device);
  }
  const auto lock = self.context->enter();
  const RowMajorInput a_rows(&a);
  const RowMajorInput b_rows(&b);
  const EpilogueInputs inputs{RowMajorInput(bias), RowMajorInput(residual), RowMajorInput(rms_norm_weight)};
  require_apart(a_rows, &a, {&out, residual_out});
  require_apart(b_rows, &b, {&out, residual_out});
  require_apart(inputs.bias, bias, {&out, residual_out});
  require_apart(inputs.residual, residual, {&out, residual_out});
  require_apart(inputs.rms_norm_weight, rms_norm_weight, {&out, residual_out});

  Operands operands{.a = a_rows.data(),
                    .lda = a_rows.row_stride(),
                    .b = b_rows.data(),
                    .ldb = b_rows.row_stride(),
                    .out = out.data,
                    .ldo = out.row_stride(),
                    .epilogue = {},
                    .stream = reinterpret_cast<void*>(stream)};
  operands.epilogue = {.bias = inputs.bias.data(),
                       .activation = parse_activation(activation),
                       .residual = inputs.residual.data(),
                       .residual_ld = inputs.residual.row_stride(),
                       .residual_out = residual_out == nullptr ? nullptr : residual_out->data,
                       .residual_out_ld = residual_out == nullptr ? 0 : residual_out->row_stride(),
                       .rms_norm_weight = inputs.rms_norm_weight.data(),
                       .rms_norm_eps = static_cast<float>(rms_norm_eps)};
  self.gemm->run(operands, parse_method(method), Mode::kRun, timeline);
}

/// Puts this rank's rows of a matrix that is gathered into their place in the whole matrix, which is dense.
void place_slice(const Operator& self, const Array& slice, const Array& whole, std::uintptr_t stream) {
  const nb::gil_scoped_release release;
  const int device = self.context->device;
  require_device(&slice, device);
  require_device(&whole, device);
  if (!whole.is_dense() || !whole.writable || slice.dtype != whole.dtype || slice.shape.size() != 2 ||
      whole.shape.size() != 2 || slice.shape[1] != whole.shape[1] ||
      self.first_row + slice.shape[0] > whole.shape[0]) {
    core::fail(ErrorKind::kBadArgument, "{} does not fit into {} from row {} on", slice.description(),
               whole.description(), self.first_row);
  }
  const RowMajorInput input(&slice);
  const std::int64_t element = size_of(slice.dtype);
  const auto row_bytes = static_cast<std::size_t>(slice.shape[1] * element);
  const DeviceRows rows{.from = static_cast<const std::byte*>(input.data()),
                        .from_stride = static_cast<std::size_t>(input.row_stride() * element),
                        .to = whole.data + self.first_row * whole.shape[1] * element,
                        .to_stride = row_bytes,
                        .row_bytes = row_bytes,
                        .rows = static_cast<std::size_t>(slice.shape[0])};
  if (rows.rows == 0 || row_bytes == 0 || rows.from == rows.to) return;
  if (device >= 0) {
    copy_on_gpu(device, rows, reinterpret_cast<void*>(stream));
    return;
  }
  for (std::size_t row = 0; row < rows.rows; ++row) {
    std::memmove(rows.to + row * rows.to_stride, rows.from + row * rows.from_stride, row_bytes);
  }
}

}  // namespace

void bind_operators(nb::module_& module) {
  nb::class_<Operator>(module, "Operator")
      .def("run", run, nb::arg("a"), nb::arg("b"), nb::arg("out"), nb::arg("bias").none(),
           nb::arg("activation"), nb::arg("residual").none(), nb::arg("residual_out").none(),
           nb::arg("rms_norm_weight").none(), nb::arg("rms_norm_eps"), nb::arg("method"), nb::arg("stream"),
           nb::arg("timeline").none())
      .def(
          "plan_json",
          [](const Operator& self, const std::string& method) {
            return to_json(self.gemm->plan(parse_method(method)));
          },
          nb::arg("method"))
      .def_prop_ro("output_rows", [](const Operator& self) { return self.gemm->output_rows(); })
      .def_prop_ro("output_columns", [](const Operator& self) { return self.gemm->plan().output_cols; })
      .def("place_slice", place_slice, nb::arg("slice"), nb::arg("whole"), nb::arg("stream"))
      .def_ro("rows_from", &Operator::rows_from);
  module.def(
      "make_operator",
      [](const std::shared_ptr<GuardedContext>& context, const std::string& name, std::int64_t m,
         std::int64_t n, std::int64_t k, const std::string& dtype, const std::vector<std::int64_t>& tile,
         const std::vector<std::int64_t>& partition, const std::string& rows, const std::string& overlap,
         const std::vector<std::int32_t>& destinations, const std::vector<std::int64_t>& row_sizes,
         const std::vector<std::int64_t>& column_sizes, std::int64_t parts) {
        return make_gemm(context, name, gemm_options(m, n, k, dtype, tile, partition),
                         {.rows = parse_rows(rows),
                          .overlap = parse_overlap(overlap),
                          .destinations = destinations,
                          .slices = {.sizes = row_sizes, .parts = parts},
                          .columns = {.sizes = column_sizes, .parts = parts}});
      },
      nb::arg("context"), nb::arg("name"), nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("dtype"),
      nb::arg("tile"), nb::arg("partition"), nb::arg("rows"), nb::arg("overlap"), nb::arg("destinations"),
      nb::arg("row_sizes"), nb::arg("column_sizes"), nb::arg("parts"));
  module.def(
      "owned_rows",
      [](std::int64_t m, std::int64_t tile_m, std::int32_t world_size, std::int32_t rank,
         const std::string& rows) { return owned_rows(m, tile_m, world_size, rank, parse_rows(rows)); },
      nb::arg("m"), nb::arg("tile_m"), nb::arg("world_size"), nb::arg("rank"), nb::arg("rows"));
}

}  // namespace flashoverlap::python
