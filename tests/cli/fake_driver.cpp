// Stands in for libcuda.so.1: three GPUs, of which the first two address each other's memory.
// FAKE_DRIVER=init lets cuInit fail, FAKE_DRIVER=none has no GPU.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool is(const char* what) {
  const char* const set = std::getenv("FAKE_DRIVER");
  return set != nullptr && std::strcmp(set, what) == 0;
}

// Handles are not numbers of devices.
constexpr int kFirstHandle = 40;

}  // namespace

extern "C" {

int cuInit(unsigned /*flags*/) {
  return is("init") ? 100 : 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13020;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = is("none") ? 0 : 3;
  return 0;
}
int cuDeviceGet(int* device, int number) {
  *device = kFirstHandle + number;
  return 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  std::snprintf(name, static_cast<std::size_t>(size), "Made-up GPU %c", 'A' + device - kFirstHandle);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
  return 0;
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int /*device*/) {
  *bytes = std::size_t{96} << 30U;
  return 0;
}
int cuDeviceCanAccessPeer(int* reaches, int device, int peer) {
  constexpr int kApart = kFirstHandle + 2;
  *reaches = device != kApart && peer != kApart ? 1 : 0;
  return 0;
}
}
