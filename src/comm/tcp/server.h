#pragma once

#include <memory>
#include <vector>

#include "comm/tcp/socket.h"

namespace flashoverlap::comm::tcp {

/// One rank's part of one exchange, as it travels.
struct Request {
  std::vector<std::uint32_t> ranks;  ///< Of the group, in its order.
  std::uint64_t instance = 0;        ///< Which of the groups of these ranks.
  std::uint64_t number = 0;          ///< Of the exchange in that group.
  std::uint64_t timeout_ms = 0;
  std::string label;  ///< Must be the same on all ranks.
  std::string bytes;
};
Frame encode(const Request& request);
/// Throws Error(kCommunication) for what encode did not make.
Request decode_request(const Frame& frame);

Frame encode_reply(std::uint64_t number, const std::vector<std::string>& values);
std::vector<std::string> decode_reply(const Frame& frame);

/// Rank 0's side: collects the parts of each exchange and sends all of them to all its ranks. Runs on a
/// thread of its own until every client has closed its connection. `clients[r]` is connected to rank r.
void serve(std::vector<Socket> clients);

}  // namespace flashoverlap::comm::tcp
