#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/call.h"

/// Calls as bytes. Each participant sends its call ahead of its data, so that the others can tell whether the
/// calls match, and can say in an error message what it was doing.
namespace flashoverlap::comm::mpi {

/// Payloads up to this size travel inside the header.
inline constexpr std::size_t kInlinePayload = 256;

/// Most bytes that `encode` makes for a group of `ranks` ranks. Long labels are cut.
[[nodiscard]] std::size_t max_header_bytes(int ranks);

[[nodiscard]] std::string encode(const Call& call);

struct Header {
  Call call;                      ///< Without buffers; its payload when that came with the header.
  std::int64_t payload_size = 0;  ///< Of the whole payload.
  [[nodiscard]] bool payload_follows() const {
    return payload_size > static_cast<std::int64_t>(kInlinePayload);
  }
};

/// Throws Error(kCommunication) for bytes that `encode` of this version did not make.
[[nodiscard]] Header decode(std::string_view bytes, int sender);

}  // namespace flashoverlap::comm::mpi
