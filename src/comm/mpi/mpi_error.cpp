#include "comm/mpi/mpi_error.h"

#include <array>

#include "core/fail.h"

namespace flashoverlap::comm::mpi {

std::string error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return fmt::format("error {}", code);
  return {text.data(), static_cast<std::size_t>(length)};
}

void check(int code, std::string_view what) {
  if (code == MPI_SUCCESS) return;
  core::fail(ErrorKind::kCommunication, "{} failed: {}", what, error_text(code));
}

}  // namespace flashoverlap::comm::mpi
