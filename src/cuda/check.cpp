#include "check.h"

#include <cstdarg>
#include <cstdio>
#include <string>

#include "flashoverlap/error.h"

namespace flashoverlap::cuda {

void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  // A launch error that is not sticky stays until it is read; the next call must not report it again.
  (void)cudaGetLastError();
  const ErrorKind kind = status == cudaErrorMemoryAllocation ? ErrorKind::kOutOfMemory : ErrorKind::kDevice;
  throw Error(kind, std::string(call) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                        ") at " + file + ":" + std::to_string(line));
}

void throw_bad_argument(const char* format, ...) {
  char text[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Error(ErrorKind::kBadArgument, text);
}

}  // namespace flashoverlap::cuda
