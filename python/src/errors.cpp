#include <exception>

#include "bindings.h"
#include "flashoverlap/error.h"

namespace flashoverlap::python {
namespace {

/// Class in flashoverlap.errors; the module is looked up when an error is raised, not when this one is
/// imported.
const char* class_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadArgument:
      return "BadArgumentError";
    case ErrorKind::kUnsupported:
      return "UnsupportedError";
    case ErrorKind::kOutOfMemory:
      return "OutOfMemoryError";
    case ErrorKind::kFile:
      return "FileError";
    case ErrorKind::kDevice:
      return "DeviceError";
    case ErrorKind::kCommunication:
      return "CommunicationError";
    case ErrorKind::kTimeout:
      return "TimeoutError";
    case ErrorKind::kInternal:
      return "InternalError";
  }
  return "Error";
}

void translate(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object type = nb::module_::import_("flashoverlap.errors").attr(class_of(error.kind()));
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace

void bind_errors(nb::module_& /*module*/) {
  nb::register_exception_translator(translate);
}

}  // namespace flashoverlap::python
