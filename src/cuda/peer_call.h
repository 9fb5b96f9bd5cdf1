// What the ranks of a peer group tell each other of one collective, and whether it fits together.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/communicator.h"
#include "peer_reader.h"

namespace flashoverlap::cuda {

/// What one rank passes to one collective. Addresses are valid for whoever has the object.
struct PeerCall {
  std::string_view kind;
  const void* send = nullptr;                ///< What the others read.
  void* receive = nullptr;                   ///< What the others write; all-reduce only.
  std::vector<std::int64_t> send_counts;     ///< Per rank; all-reduce: one entry.
  std::vector<std::int64_t> receive_counts;  ///< All-to-all only.
  DType dtype = DType::kFloat32;
  TransferLabel label;
  std::vector<PeerMessage> sends = {};     ///< Of an exchange of messages.
  std::vector<PeerMessage> receives = {};  ///< The same.
};

/// "all-to-all for gemm-all-to-all m=…, group 3"
std::string describe(const PeerCall& call);

/// Why calls[r] of the ranks r are not one collective; empty: they are. Every rank that has the same calls
/// comes to the same verdict.
std::string mismatch(const std::vector<PeerCall>& calls);

}  // namespace flashoverlap::cuda
