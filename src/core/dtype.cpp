#include "flashoverlap/dtype.h"

#include <array>
#include <string>

#include "flashoverlap/error.h"

namespace flashoverlap {

std::int64_t size_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "f32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "f16";
  }
  return "?";
}

DType parse_dtype(std::string_view name) {
  for (const DType dtype : std::array{DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw Error(ErrorKind::kBadArgument,
              "type '" + std::string(name) + "' is not known; accepted: f32, bf16, f16");
}

}  // namespace flashoverlap
