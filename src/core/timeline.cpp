#include "flashoverlap/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string_view>
#include <tuple>

namespace flashoverlap {
namespace {

/// Tracks sort by rank, then by name, with a number at the end taken as a number: "compute 2" before "compute
/// 10".
struct TrackKey {
  std::int32_t rank;
  std::string stem;
  std::string number;

  explicit TrackKey(const Span& span) : rank(span.rank) {
    const auto last = span.track.find_last_not_of("0123456789");
    const std::size_t stem_size = last == std::string::npos ? 0 : last + 1;
    stem = span.track.substr(0, stem_size);
    number = span.track.substr(stem_size);
  }
  bool operator<(const TrackKey& other) const {
    return std::forward_as_tuple(rank, stem, number.size(), number) <
           std::forward_as_tuple(other.rank, other.stem, other.number.size(), other.number);
  }
  [[nodiscard]] std::string track() const { return stem + number; }
};

using Tracks = std::map<TrackKey, std::vector<const Span*>>;

/// Spans without a finite begin and an end at or after it cannot be drawn and are left out.
Tracks tracks_of(const Timeline& timeline) {
  Tracks tracks;
  for (const Span& span : timeline.spans) {
    if (std::isfinite(span.begin_us) && std::isfinite(span.end_us) && span.begin_us <= span.end_us) {
      tracks[TrackKey(span)].push_back(&span);
    }
  }
  return tracks;
}

struct Interval {
  double begin_us = 0;
  double end_us = 0;
};

Interval extent_of(const Tracks& tracks) {
  Interval extent{INFINITY, -INFINITY};
  for (const auto& [key, spans] : tracks) {
    for (const Span* span : spans) {
      extent.begin_us = std::min(extent.begin_us, span->begin_us);
      extent.end_us = std::max(extent.end_us, span->end_us);
    }
  }
  return tracks.empty() ? Interval{} : extent;
}

constexpr int kNumKinds = 5;

char symbol_of(int kind) {
  constexpr std::array<char, kNumKinds> kSymbols{'#', '=', '.', 'e', 'o'};
  return kSymbols[static_cast<std::size_t>(kind)];
}

std::string_view category_of(SpanKind kind) {
  constexpr std::array<std::string_view, kNumKinds> kNames{"compute", "communication", "wait", "epilogue",
                                                           "other"};
  return kNames[static_cast<std::size_t>(kind)];
}

/// One character per cell: what took most of the cell's time, or ' ' where that was nothing. A span that this
/// would hide altogether still gets the cell of its middle.
std::string draw_track(const std::vector<const Span*>& spans, Interval extent, int num_cells) {
  const double cell_us = std::max((extent.end_us - extent.begin_us) / num_cells, 1e-9);
  const auto cell_of = [&](double time_us) {
    return std::clamp(static_cast<int>((time_us - extent.begin_us) / cell_us), 0, num_cells - 1);
  };
  std::vector<std::array<double, kNumKinds>> busy_us(static_cast<std::size_t>(num_cells));
  for (const Span* span : spans) {
    for (int cell = cell_of(span->begin_us); cell <= cell_of(span->end_us); ++cell) {
      const double cell_begin_us = extent.begin_us + cell * cell_us;
      const double shared_us =
          std::min(span->end_us, cell_begin_us + cell_us) - std::max(span->begin_us, cell_begin_us);
      busy_us[static_cast<std::size_t>(cell)][static_cast<std::size_t>(span->kind)] +=
          std::max(shared_us, 0.0);
    }
  }
  std::string line(static_cast<std::size_t>(num_cells), ' ');
  for (std::size_t cell = 0; cell < line.size(); ++cell) {
    const auto most = std::max_element(busy_us[cell].begin(), busy_us[cell].end());
    if (*most >= cell_us / 2) line[cell] = symbol_of(static_cast<int>(most - busy_us[cell].begin()));
  }
  for (const Span* span : spans) {
    char& cell = line[static_cast<std::size_t>(cell_of((span->begin_us + span->end_us) / 2))];
    if (cell == ' ') cell = symbol_of(static_cast<int>(span->kind));
  }
  return line;
}

std::string duration_text(double us) {
  if (us >= 1e6) return fmt::format("{:.2f} s", us / 1e6);
  if (us >= 1e3) return fmt::format("{:.2f} ms", us / 1e3);
  return fmt::format("{:.1f} us", us);
}

/// Names come from users' operations: text that is not UTF-8 must not spoil the file.
std::string dump(const nlohmann::json& event) {
  return event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

void write_chrome_trace(const Timeline& timeline, std::ostream& out) {
  const Tracks tracks = tracks_of(timeline);
  const double origin_us = extent_of(tracks).begin_us;
  std::string_view separator = "\n";
  const auto emit = [&](const nlohmann::json& event) {
    out << separator << dump(event);
    separator = ",\n";
  };

  out << R"({"displayTimeUnit":"ms","traceEvents":[)";
  int track_id = 0;
  std::optional<std::int32_t> last_rank;
  for (const auto& [key, spans] : tracks) {
    const nlohmann::json place{{"pid", key.rank}, {"tid", ++track_id}, {"ph", "M"}};
    const auto describe = [&](const char* what, const char* field, const nlohmann::json& value) {
      nlohmann::json event = place;
      event["name"] = what;
      event["args"] = {{field, value}};
      emit(event);
    };
    if (key.rank != last_rank) {
      describe("process_name", "name", fmt::format("rank {}", key.rank));
      describe("process_sort_index", "sort_index", key.rank);
      last_rank = key.rank;
    }
    describe("thread_name", "name", key.track());
    describe("thread_sort_index", "sort_index", track_id);
    for (const Span* span : spans) {
      emit({{"pid", key.rank},
            {"tid", track_id},
            {"ph", "X"},
            {"name", span->name},
            {"cat", category_of(span->kind)},
            {"ts", span->begin_us - origin_us},
            {"dur", span->end_us - span->begin_us}});
    }
  }
  out << "\n]}\n";
}

std::string to_text(const Timeline& timeline, int width) {
  const Tracks tracks = tracks_of(timeline);
  if (tracks.empty()) return "(nothing ran)\n";
  const Interval extent = extent_of(tracks);

  std::size_t label_size = 0;
  std::vector<std::string> labels;
  for (const auto& [key, spans] : tracks) {
    labels.push_back(fmt::format("rank {} {}", key.rank, key.track()));
    label_size = std::max(label_size, labels.back().size());
  }
  constexpr int kMinCells = 10;
  const int num_cells = std::max(kMinCells, width - static_cast<int>(label_size) - 3);

  std::string text;
  std::size_t row = 0;
  for (const auto& [key, spans] : tracks) {
    text += fmt::format("{:<{}} |{}|\n", labels[row++], label_size, draw_track(spans, extent, num_cells));
  }
  const std::string end = duration_text(extent.end_us - extent.begin_us);
  text += fmt::format("{:<{}}  0{:>{}}\n", "", label_size, end, num_cells - 1);
  return text;
}

}  // namespace flashoverlap
