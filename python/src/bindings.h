#pragma once

#include <nanobind/nanobind.h>

/// The parts of the extension module, one file each.
namespace flashoverlap::python {

namespace nb = nanobind;

void bind_errors(nb::module_& module);
void bind_array(nb::module_& module);
void bind_communicator(nb::module_& module);
void bind_process_group(nb::module_& module);
void bind_context(nb::module_& module);
void bind_operators(nb::module_& module);
void bind_moe(nb::module_& module);
void bind_planning(nb::module_& module);
void bind_pricing(nb::module_& module);
void bind_timeline(nb::module_& module);

}  // namespace flashoverlap::python
