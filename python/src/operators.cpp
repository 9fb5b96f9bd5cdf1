#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "bindings.h"
#include "context.h"
#include "core/fail.h"
#include "flashoverlap/operators.h"
#include "gpu.h"
#include "names.h"
#include "operator_factory.h"

namespace flashoverlap::python {
namespace {

/// Keeps the context for as long as the operator, which works in it.
struct Operator {
  std::shared_ptr<GuardedContext> context;
  MadeOperator made;

  explicit Operator(std::shared_ptr<GuardedContext> context_) : context(std::move(context_)) {}
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;
  ~Operator() {
    const nb::gil_scoped_release release;
    made.gemm.reset();
    context.reset();
  }
};

std::unique_ptr<Operator> make_gemm(const std::shared_ptr<GuardedContext>& context, const std::string& name,
                                    const GemmOptions& options, const OperatorOptions& special) {
  auto op = std::make_unique<Operator>(context);
  const nb::gil_scoped_release release;
  const auto lock = context->enter();
  op->made = make_gemm_operator(context->context, name, options, special);
  return op;
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
  self.made.gemm->run(operands, parse_method(method), Mode::kRun, timeline);
}

/// Rows of this rank's slice that lie together in the whole matrix.
struct Run {
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::int64_t rows = 0;
};

std::vector<Run> runs_of_slice(const Gathered& gathered, std::int64_t rows, Method method) {
  if (method != Method::kSliced) return {{.from = 0, .to = gathered.first_row, .rows = rows}};
  std::vector<Run> runs;
  for (std::int64_t to = 0; to < std::ssize(gathered.sliced); ++to) {
    const std::int64_t from = gathered.sliced[static_cast<std::size_t>(to)] - gathered.first_row;
    if (from < 0 || from >= rows) continue;
    if (!runs.empty() && runs.back().to + runs.back().rows == to &&
        runs.back().from + runs.back().rows == from) {
      ++runs.back().rows;
    } else {
      runs.push_back({.from = from, .to = to, .rows = 1});
    }
  }
  return runs;
}

void copy_rows(const DeviceRows& rows, int device, std::uintptr_t stream) {
  if (rows.rows == 0 || rows.row_bytes == 0 || rows.from == rows.to) return;
  if (device >= 0) {
    copy_on_gpu(device, rows, reinterpret_cast<void*>(stream));
    return;
  }
  for (std::size_t row = 0; row < rows.rows; ++row) {
    std::memmove(rows.to + row * rows.to_stride, rows.from + row * rows.from_stride, rows.row_bytes);
  }
}

/// Puts this rank's rows of a matrix that is gathered into their place in the whole matrix, which is dense.
void place_slice(const Operator& self, const Array& slice, const Array& whole, const std::string& method,
                 std::uintptr_t stream) {
  const nb::gil_scoped_release release;
  const int device = self.context->device;
  require_device(&slice, device);
  require_device(&whole, device);
  if (!whole.is_dense() || !whole.writable || slice.dtype != whole.dtype || slice.shape.size() != 2 ||
      whole.shape.size() != 2 || slice.shape[1] != whole.shape[1] ||
      self.made.gathered.first_row + slice.shape[0] > whole.shape[0]) {
    core::fail(ErrorKind::kBadArgument, "{} does not fit into {} from row {} on", slice.description(),
               whole.description(), self.made.gathered.first_row);
  }
  const RowMajorInput input(&slice);
  const std::int64_t element = size_of(slice.dtype);
  const std::int64_t stride = input.row_stride() * element;
  const std::int64_t row_bytes = slice.shape[1] * element;
  for (const Run& run : runs_of_slice(self.made.gathered, slice.shape[0], parse_method(method))) {
    copy_rows({.from = static_cast<const std::byte*>(input.data()) + run.from * stride,
               .from_stride = static_cast<std::size_t>(stride),
               .to = whole.data + run.to * row_bytes,
               .to_stride = static_cast<std::size_t>(row_bytes),
               .row_bytes = static_cast<std::size_t>(row_bytes),
               .rows = static_cast<std::size_t>(run.rows)},
              device, stream);
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
            return to_json(self.made.gemm->plan(parse_method(method)));
          },
          nb::arg("method"))
      .def_prop_ro("output_rows", [](const Operator& self) { return self.made.gemm->output_rows(); })
      .def_prop_ro("output_columns", [](const Operator& self) { return self.made.gemm->plan().output_cols; })
      .def("place_slice", place_slice, nb::arg("slice"), nb::arg("whole"), nb::arg("method"),
           nb::arg("stream"))
      .def_prop_ro("sliced_rows", [](const Operator& self) { return self.made.gathered.sliced; })
      .def_prop_ro("rows_from", [](const Operator& self) { return self.made.rows_from; });
  module.def(
      "make_operator",
      [](const std::shared_ptr<GuardedContext>& context, const std::string& name, std::int64_t m,
         std::int64_t n, std::int64_t k, const std::string& dtype, const std::vector<std::int64_t>& tile,
         const std::vector<std::int64_t>& partition, const std::string& rows, const std::string& overlap,
         const std::vector<std::int32_t>& destinations, const std::vector<std::int64_t>& row_sizes,
         const std::vector<std::int64_t>& column_sizes, std::int64_t parts, std::int64_t send_channels,
         std::int64_t num_slices) {
        return make_gemm(context, name, gemm_options(m, n, k, dtype, tile, partition),
                         {.rows = parse_rows(rows),
                          .overlap = parse_overlap(overlap),
                          .destinations = destinations,
                          .slices = slices_of(row_sizes, column_sizes, parts, send_channels),
                          .baseline = {.num_slices = num_slices}});
      },
      nb::arg("context"), nb::arg("name"), nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("dtype"),
      nb::arg("tile"), nb::arg("partition"), nb::arg("rows"), nb::arg("overlap"), nb::arg("destinations"),
      nb::arg("row_sizes"), nb::arg("column_sizes"), nb::arg("parts"), nb::arg("send_channels"),
      nb::arg("num_slices"));
  module.def(
      "owned_rows",
      [](std::int64_t m, std::int64_t tile_m, std::int32_t world_size, std::int32_t rank,
         const std::string& rows) { return owned_rows(m, tile_m, world_size, rank, parse_rows(rows)); },
      nb::arg("m"), nb::arg("tile_m"), nb::arg("world_size"), nb::arg("rank"), nb::arg("rows"));
}

}  // namespace flashoverlap::python
