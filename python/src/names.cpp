#include "names.h"

#include <fmt/ranges.h>

#include <array>
#include <utility>

#include "core/fail.h"

namespace flashoverlap::python {
namespace {

template <typename Value, std::size_t kSize>
Value parse(std::string_view what, std::string_view name,
            const std::array<std::pair<std::string_view, Value>, kSize>& accepted) {
  std::string names;
  for (const auto& [known, value] : accepted) {
    if (known == name) return value;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  core::fail(ErrorKind::kBadArgument, "{} '{}' is not accepted; expected one of {}", what, name, names);
}

}  // namespace

Activation parse_activation(std::string_view name) {
  return parse("activation", name,
               std::array{std::pair(std::string_view("none"), Activation::kNone),
                          std::pair(std::string_view("relu"), Activation::kRelu),
                          std::pair(std::string_view("gelu"), Activation::kGelu),
                          std::pair(std::string_view("silu"), Activation::kSilu)});
}

Method parse_method(std::string_view name) {
  return parse("method", name,
               std::array{std::pair(std::string_view("auto"), Method::kOverlap),
                          std::pair(std::string_view("overlap"), Method::kOverlap),
                          std::pair(std::string_view("serial"), Method::kSerial),
                          std::pair(std::string_view("sliced"), Method::kSliced)});
}

OverlapMethod parse_overlap(std::string_view name) {
  return parse("overlap", name,
               std::array{std::pair(std::string_view("auto"), OverlapMethod::kAuto),
                          std::pair(std::string_view("signal"), OverlapMethod::kSignal),
                          std::pair(std::string_view("tail-free"), OverlapMethod::kTailFree)});
}

RowOwnership parse_rows(std::string_view name) {
  return parse("rows", name,
               std::array{std::pair(std::string_view("contiguous"), RowOwnership::kContiguous),
                          std::pair(std::string_view("block-cyclic"), RowOwnership::kBlockCyclic)});
}

TransferKind parse_collective(std::string_view name) {
  return parse("operation", name,
               std::array{std::pair(std::string_view("gemm-all-reduce"), TransferKind::kAllReduce),
                          std::pair(std::string_view("gemm-reduce-scatter"), TransferKind::kReduceScatter),
                          std::pair(std::string_view("gemm-all-to-all"), TransferKind::kAllToAll)});
}

}  // namespace flashoverlap::python
