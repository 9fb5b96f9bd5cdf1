#include "check.h"

#include <cstdarg>
#include <cstdio>
#include <string>

#include "flashoverlap/error.h"

namespace flashoverlap::cuda {

void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  // A launch error stays until it is read; the next call must not report it again.
  (void)cudaGetLastError();
  const ErrorKind kind = status == cudaErrorMemoryAllocation ? ErrorKind::kOutOfMemory : ErrorKind::kDevice;
  throw Error(kind, std::string(call) + " at " + file + ":" + std::to_string(line) + ": " + cudaGetErrorName(status) + ": " +
                        cudaGetErrorString(status));
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
