#include <algorithm>

#include "core/fail.h"
#include "flashoverlap/moe_choice.h"
#include "ops/agree.h"
#include "ops/moe_state.h"

/// "Not overlapping where that wins": how a layer decides.
namespace flashoverlap {
namespace {

/// Rows that the busiest rank computes.
std::int64_t most_rows(const MoeCounts& counts) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(counts.world_size), 0);
  for (std::int32_t rank = 0; rank < counts.world_size; ++rank) {
    const std::int64_t end = first_expert(counts.num_experts, counts.world_size, rank + 1);
    for (std::int64_t e = first_expert(counts.num_experts, counts.world_size, rank); e < end; ++e) {
      for (std::int32_t owner = 0; owner < counts.world_size; ++owner) {
        rows[static_cast<std::size_t>(rank)] += counts.at(owner, e);
      }
    }
  }
  return std::ranges::max(rows);
}

}  // namespace

std::string_view name_of(MoeOverlapIf overlap_if) {
  switch (overlap_if) {
    case MoeOverlapIf::kAlways:
      return "always";
    case MoeOverlapIf::kMeasured:
      return "measured";
    case MoeOverlapIf::kPredicted:
      return "predicted";
  }
  return "unknown";
}

MoeOverlapIf parse_moe_overlap_if(std::string_view name) {
  for (const MoeOverlapIf one : {MoeOverlapIf::kAlways, MoeOverlapIf::kMeasured, MoeOverlapIf::kPredicted}) {
    if (name == name_of(one)) return one;
  }
  core::fail(ErrorKind::kBadArgument,
             "overlap_if '{}' is not accepted; expected one of always, measured, predicted", name);
}

Method MoeLayer::State::decide(Method asked, const MoeCounts& counts, double last_call_us,
                               MoeReport& report) {
  report.method = asked;
  if (asked != Method::kOverlap || options.overlap_if == MoeOverlapIf::kAlways || communicator.size() == 1) {
    return asked;
  }
  const std::int64_t load = most_rows(counts);
  if (options.overlap_if == MoeOverlapIf::kMeasured) {
    const ops::MoeChooser::Decision decision = chooser.next(load, last_call_us);
    report.method = decision.method;
    report.choice = decision.reason;
    return report.method;
  }
  if (ops::is_other_load(load, predicted_rows)) {
    predicted = predict(counts);
    predicted_rows = load;
  }
  report.method = predicted.method;
  report.choice = predicted.reason;
  return report.method;
}

/// Rank 0 simulates; all take what it says.
ops::MoeChooser::Decision MoeLayer::State::predict(const MoeCounts& counts) {
  const std::vector<std::string> all = ops::agree(communicator, label(), [&]() -> ops::Ticket {
    ops::Ticket ticket{.agreement = 0, .description = "choice of overlap", .payload = {}};
    if (communicator.rank() != 0) return ticket;
    MoeChoiceRequest request;
    request.counts = with_capacity(counts, options.capacity);
    request.options =
        with_tile(plan_options(Method::kOverlap), request.counts, options.hidden, options.intermediate);
    request.hidden = options.hidden;
    request.hidden_cols = activation().hidden_cols();
    request.intermediate = options.intermediate;
    request.consumers_take_units =
        device != nullptr && device->consumers_take_units();  // threads mostly wait
    if (device != nullptr) request.options.resources.compute_units = device->num_units();
    const MoeChoice choice = choose_moe(request, *options.machine);
    ticket.payload = (choice.overlaps() ? "o" : "s") + choice.reason;
    return ticket;
  });
  return {.method = all[0].front() == 'o' ? Method::kOverlap : Method::kSerial,
          .reason = "predicted, " + all[0].substr(1)};
}

}  // namespace flashoverlap
