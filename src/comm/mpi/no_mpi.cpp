#include "core/fail.h"
#include "flashoverlap/mpi.h"

// In place of the MPI communicator where this library is built without MPI.
namespace flashoverlap {

std::shared_ptr<Communicator> make_mpi_communicator(const MpiOptions& /*options*/) {
  core::fail(ErrorKind::kUnsupported,
             "this library was built without MPI: install OpenMPI or MPICH (Debian: apt-get install "
             "libopenmpi-dev openmpi-bin) and configure with -DFLASHOVERLAP_MPI=ON");
}

std::string mpi_library_name() {
  return {};
}

}  // namespace flashoverlap
