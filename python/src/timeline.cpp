#include "flashoverlap/timeline.h"

#include <nanobind/stl/string.h>

#include <sstream>
#include <string>

#include "bindings.h"

namespace flashoverlap::python {
namespace {

std::string_view name_of_kind(SpanKind kind) {
  switch (kind) {
    case SpanKind::kCompute:
      return "compute";
    case SpanKind::kCommunication:
      return "communication";
    case SpanKind::kWait:
      return "wait";
    case SpanKind::kEpilogue:
      return "epilogue";
    case SpanKind::kOther:
      return "other";
  }
  return "";
}

nb::list spans(const Timeline& timeline) {
  nb::list list;
  for (const Span& span : timeline.spans) {
    nb::dict item;
    item["rank"] = span.rank;
    item["track"] = span.track;
    item["name"] = span.name;
    item["kind"] = std::string(name_of_kind(span.kind));
    item["begin_us"] = span.begin_us;
    item["end_us"] = span.end_us;
    list.append(item);
  }
  return list;
}

}  // namespace

void bind_timeline(nb::module_& module) {
  nb::class_<Timeline>(module, "Timeline", "What ran where and when. Times in microseconds.")
      .def(nb::init<>())
      .def_prop_ro("spans", spans, "One dict per span: rank, track, name, kind, begin_us, end_us.")
      .def(
          "to_text", [](const Timeline& self, int width) { return to_text(self, width); },
          nb::arg("width") = 100, "A picture for the terminal, one line per rank and track.")
      .def(
          "to_chrome_trace",
          [](const Timeline& self) {
            std::ostringstream out;
            write_chrome_trace(self, out);
            return out.str();
          },
          "Chrome and Perfetto trace events, as JSON text.")
      .def("__len__", [](const Timeline& self) { return self.spans.size(); })
      .def("__str__", [](const Timeline& self) { return to_text(self, 100); });
}

}  // namespace flashoverlap::python
