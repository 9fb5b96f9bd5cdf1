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

namespace {

PreparedPlan& prepared_for(const ops::PreparedPlans& plans, Method method) {
  switch (method) {
    case Method::kOverlap:
      return *plans.overlap;
    case Method::kSerial:
      return *plans.serial;
    case Method::kSliced:
      break;
  }
  if (plans.sliced == nullptr) {
    core::fail(ErrorKind::kBadArgument, "{} was made without a sliced baseline; expected num_slices >= 1",
               plans.overlap->plan().operation);
  }
  return *plans.sliced;
}

}  // namespace

void GemmOperator::run(const Operands& operands, Method method, Mode mode, Timeline* timeline) {
  const ops::PreparedPlans& plans = state_->plans;
  if (operands.make_rows && !plans.executor->makes_rows()) {
    core::fail(ErrorKind::kUnsupported,
               "make_rows is given, but the executor of {} cannot make rows of a while it runs; expected a "
               "that is complete at the call",
               plans.overlap->plan().operation);
  }
  plans.executor->execute(prepared_for(plans, method), operands, mode, timeline);
}

const OverlapPlan& GemmOperator::plan(Method method) const {
  return prepared_for(state_->plans, method).plan();
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

}  // namespace flashoverlap
