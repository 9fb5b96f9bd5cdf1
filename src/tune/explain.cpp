#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "flashoverlap/tuner.h"

namespace flashoverlap {
namespace {

std::string describe(const TuneChoice& choice) {
  const std::string units =
      choice.resources.communication_units > 0
          ? fmt::format(", {} units compute and {} communicate", choice.resources.compute_units,
                        choice.resources.communication_units)
          : fmt::format(", {} units", choice.resources.compute_units);
  return fmt::format("tile {}x{}{}", choice.tile.tile_m, choice.tile.tile_n, units);
}

/// Why this one: where the time goes.
std::string reason(const TuneChoice& best, const TuneChoice& serial) {
  const Prediction& p = best.prediction;
  if (!best.overlaps()) {
    const double hidden_at_most = std::min(serial.prediction.communication_us, serial.prediction.compute_us);
    return fmt::format(
        "Nothing is gained by overlapping: communication takes {:.1f} us and computing {:.1f} us, so at most "
        "{:.1f} us could "
        "be hidden, less than smaller transfers, slower computing and restoring the order cost.",
        serial.prediction.communication_us, serial.prediction.compute_us, hidden_at_most);
  }
  const double hidden = p.communication_us - std::max(0.0, p.exposed_us);
  const std::string bound = p.compute_us >= p.communication_us
                                ? "Computing takes longer than communicating, so the last group decides: it "
                                  "is what nothing can hide."
                                : "Communicating takes longer than computing, so the first group decides, "
                                  "and few transfers cost less than many.";
  return fmt::format("{:.1f} us of {:.1f} us of communication are hidden, {:.1f} us are exposed. {}",
                     std::max(0.0, hidden), p.communication_us, p.exposed_us, bound);
}

}  // namespace

std::string explain(const TuneResult& result) {
  const TuneChoice& best = result.best;
  const TuneChoice& serial = result.serial;
  std::string text;
  if (best.overlaps()) {
    text = fmt::format(
        "Chosen: overlap in {} groups ({}) of {} waves, {}.\n", best.partition.size(),
        fmt::join(best.partition, ","),
        [&] {
          std::int64_t waves = 0;
          for (const std::int64_t group : best.partition) waves += group;
          return waves;
        }(),
        describe(best));
  } else {
    text = fmt::format("Chosen: no overlap, {}.\n", describe(best));
  }
  text +=
      fmt::format("Predicted {:.1f} us against {:.1f} us without overlap: {:.2f}x.", best.prediction.total_us,
                  serial.prediction.total_us,
                  best.prediction.total_us > 0 ? serial.prediction.total_us / best.prediction.total_us : 1.0);
  if (best.overlaps() && best.lower_bound_us > 0) {
    text += fmt::format(" No partition can take less than {:.1f} us here ({:.0f} % reached).",
                        best.lower_bound_us, 100 * best.lower_bound_us / best.prediction.total_us);
  }
  if (result.measured_us > 0) {
    text +=
        fmt::format("\nMeasured {:.1f} us against {:.1f} us without overlap: {:.2f}x.", result.measured_us,
                    result.serial_measured_us, result.serial_measured_us / result.measured_us);
  }
  return text + "\n" + reason(best, serial) + "\n";
}

}  // namespace flashoverlap
