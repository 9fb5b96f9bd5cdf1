#pragma once

#include <string_view>

#include "flashoverlap/executor.h"
#include "flashoverlap/operators.h"
#include "flashoverlap/plan_builders.h"

/// Options by their names. Each throws Error(kBadArgument) that lists the accepted ones.
namespace flashoverlap::python {

[[nodiscard]] Activation parse_activation(std::string_view name);
[[nodiscard]] Method parse_method(std::string_view name);
[[nodiscard]] OverlapMethod parse_overlap(std::string_view name);
[[nodiscard]] RowOwnership parse_rows(std::string_view name);
[[nodiscard]] TransferKind parse_collective(std::string_view name);

}  // namespace flashoverlap::python
