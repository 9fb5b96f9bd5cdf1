#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "flashoverlap/tuner.h"

namespace flashoverlap::tune {

/// How to make the plans of one call with its tile, units and partition still open.
struct PlanMaker {
  PlanOptions call;  ///< Shape, type and world size.
  TransferKind collective = TransferKind::kAllReduce;
  std::function<std::int64_t(const PlanOptions&)> waves;
  std::function<OverlapPlan(const PlanOptions&)> build;
  /// All ranks' plans cost the same (all but the all-to-all): one is priced for all.
  [[nodiscard]] bool ranks_are_alike() const { return collective != TransferKind::kAllToAll; }
};

/// `tune_call` for any maker. `units`, `tiles` and `communication_units` as in TuneRequest, none of them left
/// open.
TuneResult tune_plans(const PlanMaker& maker, std::int64_t units, const std::vector<TileShape>& tiles,
                      std::vector<std::int64_t> communication_units, const MachineProfile& machine);

}  // namespace flashoverlap::tune
