// Any bytes are either refused with Error(kFile) or read to a profile that goes around through JSON and gives
// finite times.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "flashoverlap/error.h"
#include "flashoverlap/machine_profile.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashoverlap;
  MachineProfile profile;
  try {
    profile = parse_machine_profile({reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kFile) std::abort();
    return 0;
  }
  if (parse_machine_profile(to_json(profile), "again") != profile) std::abort();
  for (const CommunicationCurve& curve : profile.curves) {
    for (std::int64_t bytes = 1; bytes < std::int64_t{1} << 50; bytes *= 5) {
      const double time = curve.curve.time_us(bytes);
      if (!(time > 0) || !std::isfinite(time)) std::abort();
    }
  }
  return 0;
}
