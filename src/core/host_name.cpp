#include "core/host_name.h"

#include <unistd.h>

#include <array>

namespace flashoverlap::core {

std::string host_name() {
  std::array<char, 256> host{};
  return gethostname(host.data(), host.size() - 1) == 0 ? host.data() : "?";
}

}  // namespace flashoverlap::core
