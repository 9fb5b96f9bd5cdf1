// What the executor can ask of a communicator between ranks of one process, besides collectives.
#pragma once

#include <cstdint>
#include <span>

#include "flashoverlap/communicator.h"

namespace flashoverlap::cuda {

class PeerReader {
 public:
  PeerReader() = default;
  PeerReader(const PeerReader&) = delete;
  PeerReader& operator=(const PeerReader&) = delete;
  virtual ~PeerReader() = default;

  /// Whether all-gathers, all-to-alls and `read_peers` need no SM, on any rank.
  [[nodiscard]] virtual bool copies_without_sms() const = 0;

  /// to[r] = elements [begin, begin + count) of the `size` elements that rank r passes as `send`, for every
  /// other rank r. A collective: `size` is the same on all ranks, what each of them reads is its own affair.
  virtual void read_peers(const void* send, std::int64_t size, std::int64_t begin, std::int64_t count,
                          std::span<void* const> to, DType dtype, Stream& stream,
                          const TransferLabel& label) = 0;
};

}  // namespace flashoverlap::cuda
