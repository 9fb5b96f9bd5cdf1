// Any bytes are either refused with Error(kFile) or read entry by entry; what does not hold is warned of,
// never used.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "flashoverlap/error.h"
#include "flashoverlap/tuning_cache.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashoverlap;
  const MachineIdentity identity{"Test CPU", "580.1", {{"openblas", "0.3.21"}}};
  try {
    const auto entries = parse_tuning_cache({reinterpret_cast<const char*>(data), size}, "fuzz", identity,
                                            [](const std::string& warning) {
                                              if (warning.empty()) std::abort();
                                            });
    for (const TuningEntry& entry : entries) {
      if (entry.tile_m < 1 || entry.tile_n < 1 || to_text(entry.key).empty()) std::abort();
      for (const std::int64_t group : entry.partition) {
        if (group < 1) std::abort();
      }
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kFile) std::abort();
  }
  return 0;
}
