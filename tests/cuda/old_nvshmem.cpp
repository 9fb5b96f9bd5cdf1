// A library that passes for an NVSHMEM of the version in FLASHOVERLAP_TEST_NVSHMEM ("2.11.0") and has nothing
// else.
#include <cstdio>
#include <cstdlib>

extern "C" void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  *major = *minor = *patch = 0;
  const char* const version = std::getenv("FLASHOVERLAP_TEST_NVSHMEM");
  if (version != nullptr) (void)std::sscanf(version, "%d.%d.%d", major, minor, patch);
}
