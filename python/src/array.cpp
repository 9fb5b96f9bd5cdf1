#include "array.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "bindings.h"
#include "core/fail.h"

namespace flashoverlap::python {
namespace {

/// First and one past the last byte that any element occupies.
std::pair<std::uintptr_t, std::uintptr_t> extent(const Array& array) {
  const auto begin = reinterpret_cast<std::uintptr_t>(array.data);
  if (array.size() == 0) return {begin, begin};
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (std::size_t axis = 0; axis < array.shape.size(); ++axis) {
    const std::int64_t reach = (array.shape[axis] - 1) * array.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  const std::int64_t element = size_of(array.dtype);
  return {begin - static_cast<std::uintptr_t>(-low * element),
          begin + static_cast<std::uintptr_t>((high + 1) * element)};
}

std::int64_t rows_of(const Array& array) {
  return array.shape.size() == 2 ? array.shape[0] : 1;
}

std::unique_ptr<std::byte[]> packed_copy(const Array& array) {
  const std::int64_t element = size_of(array.dtype);
  const auto element_bytes = static_cast<std::size_t>(element);
  auto copy = std::make_unique<std::byte[]>(static_cast<std::size_t>(array.size() * element));
  std::byte* to = copy.get();
  const std::int64_t row_stride = array.shape.size() == 2 ? array.strides[0] : 0;
  for (std::int64_t row = 0; row < rows_of(array); ++row) {
    const std::byte* from = array.data + row * row_stride * element;
    for (std::int64_t col = 0; col < array.shape.back(); ++col, to += element) {
      std::memcpy(to, from + col * array.strides.back() * element, element_bytes);
    }
  }
  return copy;
}

std::string place_of(int device) {
  return device < 0 ? "in host memory" : fmt::format("on CUDA device {}", device);
}

int device_of(const nb::ndarray<nb::ro>& source, const std::string& name) {
  switch (source.device_type()) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value:
      return -1;
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value:
      return source.device_id();
    default:
      core::fail(ErrorKind::kBadArgument, "{} is on DLPack device type {}; expected host memory or CUDA",
                 name, source.device_type());
  }
}

DType dtype_of(const nb::dlpack::dtype& dtype, const std::string& name) {
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
  };
  if (is(nb::dlpack::dtype_code::Float, 32)) return DType::kFloat32;
  if (is(nb::dlpack::dtype_code::Float, 16)) return DType::kFloat16;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return DType::kBFloat16;
  const std::string text =
      fmt::format("{} has a DLPack type of code {} with {} bits; expected float32, float16 or bfloat16", name,
                  dtype.code, dtype.bits);
  throw nb::type_error(text.c_str());
}

Array from_dlpack(const nb::ndarray<nb::ro>& source, const std::string& name, bool writable) {
  Array array{.name = name,
              // Written only where `writable` says so.
              .data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(source.data()))),
              .shape = {},
              .strides = {},
              .dtype = dtype_of(source.dtype(), name),
              .writable = writable,
              .device = device_of(source, name),
              .lender = source};
  for (std::size_t axis = 0; axis < source.ndim(); ++axis) {
    array.shape.push_back(static_cast<std::int64_t>(source.shape(axis)));
    array.strides.push_back(source.stride(axis));
  }
  return array;
}

Array from_address(std::uintptr_t address, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                   const std::string& dtype, const std::string& name, bool writable, int device) {
  return {.name = name,
          .data = reinterpret_cast<std::byte*>(address),
          .shape = std::move(shape),
          .strides = std::move(strides),
          .dtype = parse_dtype(dtype),
          .writable = writable,
          .device = device,
          .lender = {}};
}

}  // namespace

std::int64_t Array::size() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::string Array::description() const {
  return fmt::format("{} [{}] {}", name, fmt::join(shape, ", "), name_of(dtype));
}

bool Array::has_dense_rows() const {
  if (size() == 0) return true;
  if (shape.back() > 1 && strides.back() != 1) return false;
  return rows_of(*this) == 1 || strides[0] >= shape.back();
}

bool Array::is_dense() const {
  if (size() == 0) return true;
  std::int64_t expected = 1;
  for (std::size_t axis = shape.size(); axis-- > 0; expected *= shape[axis]) {
    if (shape[axis] > 1 && strides[axis] != expected) return false;
  }
  return true;
}

std::int64_t Array::row_stride() const {
  const std::int64_t cols = shape.back();
  return size() == 0 || rows_of(*this) == 1 ? cols : strides[0];
}

bool Array::overlaps(const Array& other) const {
  if (size() == 0 || other.size() == 0) return false;
  const auto [begin, end] = extent(*this);
  const auto [other_begin, other_end] = extent(other);
  return begin < other_end && other_begin < end;
}

void require_device(const Array* array, int device) {
  if (array == nullptr || array->device == device) return;
  core::fail(ErrorKind::kBadArgument, "{} is {}; this communicator computes {}", array->description(),
             place_of(array->device), place_of(device));
}

RowMajorInput::RowMajorInput(const Array* array) {
  if (array == nullptr) return;
  if (array->has_dense_rows()) {
    data_ = array->data;
    row_stride_ = array->row_stride();
  } else if (array->device >= 0) {
    core::fail(ErrorKind::kBadArgument,
               "{} {} has strides {} (elements); on a GPU nothing is packed: expected rows of consecutive "
               "elements, as contiguous() makes them",
               array->description(), place_of(array->device), fmt::join(array->strides, ", "));
  } else {
    copy_ = packed_copy(*array);
    data_ = copy_.get();
    row_stride_ = array->shape.back();
  }
}

void bind_array(nb::module_& module) {
  nb::class_<Array>(module, "Array", "Where an array is and how it is laid out. Does not keep it alive.")
      .def_static(
          "from_dlpack",
          [](const nb::ndarray<nb::ro>& source, const std::string& name) {
            return from_dlpack(source, name, false);
          },
          nb::arg("source"), nb::arg("name"))
      .def_static(
          "from_writable_dlpack",
          [](const nb::ndarray<>& source, const std::string& name) {
            return from_dlpack(nb::ndarray<nb::ro>(source), name, true);
          },
          nb::arg("source"), nb::arg("name"))
      .def_static("from_address", from_address, nb::arg("address"), nb::arg("shape"), nb::arg("strides"),
                  nb::arg("dtype"), nb::arg("name"), nb::arg("writable"), nb::arg("device"))
      .def_ro("name", &Array::name)
      .def_ro("shape", &Array::shape)
      .def_ro("strides", &Array::strides)
      .def_ro("writable", &Array::writable)
      .def_ro("device", &Array::device)
      .def_prop_ro("address", [](const Array& array) { return reinterpret_cast<std::uintptr_t>(array.data); })
      .def_prop_ro("dtype", [](const Array& array) { return std::string(name_of(array.dtype)); })
      .def_prop_ro("has_dense_rows", &Array::has_dense_rows)
      .def_prop_ro("is_dense", &Array::is_dense)
      .def("overlaps", &Array::overlaps, nb::arg("other"))
      .def("__repr__", &Array::description);
}

}  // namespace flashoverlap::python
