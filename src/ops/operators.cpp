#include "flashoverlap/operators.h"

#include <cstring>
#include <utility>

#include "core/fail.h"
#include "ops/agree.h"
#include "ops/operator_state.h"
#include "plan/agreement.h"

namespace flashoverlap {

GemmOperator::~GemmOperator() = default;

void GemmOperator::operator()(const Operands& operands, Method method) {
  run(operands, method, Mode::kRun, nullptr);
}

void GemmOperator::run(const Operands& operands, Method method, Mode mode, Timeline* timeline) {
  const ops::PreparedPlans& plans = state_->plans;
  PreparedPlan& prepared = method == Method::kOverlap ? *plans.overlap : *plans.serial;
  plans.executor->execute(prepared, operands, mode, timeline);
}

const OverlapPlan& GemmOperator::plan(Method method) const {
  return method == Method::kOverlap ? state_->plans.overlap->plan() : state_->plans.serial->plan();
}

std::int64_t GemmOperator::output_rows() const {
  return plan().output_rows;
}

GemmAllReduce::GemmAllReduce(Context& context, const GemmOptions& options) {
  state_ = std::make_unique<State>();
  const ops::PlanRecipe recipe{.operation = "gemm-all-reduce",
                               .collective = TransferKind::kAllReduce,
                               .waves = num_waves,
                               .build = plan_all_reduce};
  state_->plans = ops::prepare_plans(context, ops::plan_options(context, options), recipe);
}

GemmReduceScatter::GemmReduceScatter(Context& context, const GemmOptions& options, RowOwnership rows) {
  state_ = std::make_unique<State>();
  const ops::PlanRecipe recipe{
      .operation = "gemm-reduce-scatter",
      .collective = TransferKind::kReduceScatter,
      .waves = [rows](const PlanOptions& chosen) { return num_waves_reduce_scatter(chosen, rows); },
      .build = [rows](const PlanOptions& chosen) { return plan_reduce_scatter(chosen, rows); },
      .variant = std::string(name_of(rows))};
  state_->plans = ops::prepare_plans(context, ops::plan_options(context, options), recipe);
}

}  // namespace flashoverlap
