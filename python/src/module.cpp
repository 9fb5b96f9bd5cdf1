#include "bindings.h"
#include "flashoverlap/version.h"

NB_MODULE(_core, module) {
  namespace python = flashoverlap::python;
  module.doc() = "The compiled half of flashoverlap. Use the package; this module may change at any time.";
  module.attr("version") = nanobind::str(flashoverlap::kVersion.data(), flashoverlap::kVersion.size());
  python::bind_errors(module);
  python::bind_array(module);
  python::bind_communicator(module);
  python::bind_process_group(module);
  python::bind_timeline(module);  // which operators name
  python::bind_planning(module);
  python::bind_pricing(module);
  python::bind_context(module);
  python::bind_operators(module);
  python::bind_moe(module);
}
