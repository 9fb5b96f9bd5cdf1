// One call of a layer of experts, and what must come of it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "gpu_matrix.h"
#include "gpu_ranks.h"
#include "moe_case.h"

namespace flashoverlap::gpu_test {

/// One rank's layer with its matrices.
class LayerCall {
 public:
  LayerCall(Rank& rank, const MoeCase& call);

  /// Makes another layer, for the same matrices.
  void use(std::int64_t consumers, std::int64_t segment_bands);

  void run_and_check(Method method);
  /// The same, and how far from the exact result, as a share of its largest element.
  [[nodiscard]] double run_for_error(Method method);

  /// Calls with `others` in turn, `rounds` times, looked at when all are done. All have the case's tokens.
  /// Before each comes `delay`, where there is one.
  void run_in_a_row_and_check(const std::vector<MoeRouting>& others, int rounds,
                              const std::function<void()>& delay = {});

  [[nodiscard]] DeviceMatrix make_out() const;
  MoeReport enqueue(const MoeRouting& routing, const DeviceMatrix& out, Method method);
  [[nodiscard]] const MoeRouting& routing() const { return call_.routings[index(rank_.rank)]; }

 private:
  [[nodiscard]] double error_of(const DeviceMatrix& out);
  void check(const DeviceMatrix& out, const MoeRouting& routing, Method method) const;

  Rank& rank_;
  const MoeCase& call_;
  std::unique_ptr<MoeLayer> layer_;
  test::MoeModel model_;
  test::Values values_;
  DeviceMatrix x_, up_, down_;
  std::optional<test::Doubles> expected_;  ///< Of the case's own routing, once it is asked for.
};

/// Calls in a row of a case of 50 tokens and 4 experts (small_case), other counts in each, ranks late at
/// random.
void run_late_calls_in_a_row(Rank& rank, const MoeCase& call);

}  // namespace flashoverlap::gpu_test
