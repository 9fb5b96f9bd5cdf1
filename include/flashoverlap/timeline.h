#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace flashoverlap {

/// kOther: work that is not the call's own (Operands::other_work).
enum class SpanKind { kCompute, kCommunication, kWait, kEpilogue, kOther };

/// Something that ran (or was simulated) on one track of one rank.
struct Span {
  std::int32_t rank = 0;
  std::string track;  ///< "compute 0", "stream 0", …
  std::string name;   ///< "tile 12", "all-reduce of group 3", …
  SpanKind kind = SpanKind::kCompute;
  double begin_us = 0;
  double end_us = 0;
};

/// What ran where and when. The same format for the CPU executor, the GPU executor and the simulator.
struct Timeline {
  std::vector<Span> spans;
};

/// Chrome and Perfetto trace events (JSON): one process per rank, one thread per track.
void write_chrome_trace(const Timeline& timeline, std::ostream& out);

/// A picture for the terminal, one line per rank and track of at most `width` columns: '#' compute, '='
/// communication,
/// '.' waiting, 'e' epilogue, 'o' other work.
std::string to_text(const Timeline& timeline, int width = 100);

}  // namespace flashoverlap
