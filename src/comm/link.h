#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/call.h"
#include "flashoverlap/in_process.h"

/// Pacing as arithmetic on time points, without a clock of its own. The formulas are in in_process.h at
/// `LinkModel`.
namespace flashoverlap::comm {

using TimePoint = std::chrono::steady_clock::time_point;

/// Bytes that a rank puts on the wire and takes from it in one call.
struct WireBytes {
  double transmit = 0;
  double receive = 0;
};

/// By participant of a call that all have made.
std::vector<WireBytes> bytes_on_wire(const std::vector<std::shared_ptr<const Call>>& calls);

/// One rank's link. Each direction carries one call after the other, so overlapping calls share the
/// bandwidth.
class Link {
 public:
  /// Books `bytes` that are ready to go at `ready`; returns when each direction is done with them. No bytes
  /// take no time and do not queue.
  struct Ends {
    TimePoint transmit;
    TimePoint receive;
  };
  Ends occupy(const LinkModel& model, TimePoint ready, const WireBytes& bytes);

 private:
  TimePoint transmit_free_{};
  TimePoint receive_free_{};
};

/// Books a call on its participants' links (links[i] is participant i's) and returns when it completes on
/// each: latency after the last end of its own and of those it exchanges data with.
std::vector<TimePoint> book(const LinkModel& model, const std::vector<Link*>& links, TimePoint ready,
                            const std::vector<std::shared_ptr<const Call>>& calls);

/// Books a put on the links of its two ranks and returns when it is complete, as a send.
TimePoint book_put(const LinkModel& model, Link& source, Link& destination, TimePoint ready, double bytes);

}  // namespace flashoverlap::comm
