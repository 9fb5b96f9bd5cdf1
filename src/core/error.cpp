#include "flashoverlap/error.h"

namespace flashoverlap {

const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadArgument:
      return "bad argument";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kOutOfMemory:
      return "out of memory";
    case ErrorKind::kFile:
      return "file error";
    case ErrorKind::kDevice:
      return "device error";
    case ErrorKind::kCommunication:
      return "communication error";
    case ErrorKind::kTimeout:
      return "time-out";
    case ErrorKind::kInternal:
      return "internal error";
  }
  return "unknown error";
}

}  // namespace flashoverlap
