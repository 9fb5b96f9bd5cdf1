// What CudaExecutor::prepare gives out. A call returns before the device has carried it out, so its owner may
// let a plan go that the device still works with.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "prepared_cuda_plan.h"

namespace flashoverlap::cuda {

/// Plans without an owner, until the device is done with them. Thread-safe.
class RetiredPlans {
 public:
  void add(std::unique_ptr<PreparedCudaPlan> plan) {
    const std::scoped_lock lock(mutex_);
    plans_.push_back(std::move(plan));
  }
  void drop_finished() {
    const std::scoped_lock lock(mutex_);
    std::erase_if(plans_, [](const auto& plan) { return !plan->is_in_use(); });
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<PreparedCudaPlan>> plans_;
};

class OwnedCudaPlan final : public PreparedPlan {
 public:
  OwnedCudaPlan(std::unique_ptr<PreparedCudaPlan> plan, std::shared_ptr<RetiredPlans> retired)
      : plan_(std::move(plan)), retired_(std::move(retired)) {}
  ~OwnedCudaPlan() override {
    if (plan_->is_in_use()) retired_->add(std::move(plan_));
  }
  OwnedCudaPlan(const OwnedCudaPlan&) = delete;
  OwnedCudaPlan& operator=(const OwnedCudaPlan&) = delete;

  [[nodiscard]] const OverlapPlan& plan() const override { return plan_->plan(); }
  [[nodiscard]] PreparedCudaPlan& get() { return *plan_; }

 private:
  std::unique_ptr<PreparedCudaPlan> plan_;
  std::shared_ptr<RetiredPlans> retired_;
};

}  // namespace flashoverlap::cuda
