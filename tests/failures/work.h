#pragma once

#include <memory>
#include <string>

#include "flashoverlap/operators.h"

namespace flashoverlap::test {

/// An operator with matrices whose results are known.
class Work {
 public:
  virtual ~Work() = default;
  /// Poisons the results, calls, and checks them. Throws std::logic_error when one is wrong.
  virtual void call() = 0;
};

/// `op`: gemm-all-reduce, gemm-reduce-scatter, gemm-all-to-all, all-gather-gemm, tail-free, moe-layer.
/// `is_wrong`: with a plan that fits no other rank's. The operator is made in here. Collective.
std::unique_ptr<Work> make_work(Context& context, const std::string& op, bool is_wrong);

std::unique_ptr<Work> make_gemm_work(Context& context, const std::string& op, bool is_wrong);
std::unique_ptr<Work> make_moe_work(Context& context, bool is_wrong);

}  // namespace flashoverlap::test
