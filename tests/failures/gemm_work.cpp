#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "failures/work.h"

namespace flashoverlap::test {
namespace {

// 48 tiles, whoever owns the rows: three groups of 16 waves.
constexpr std::int64_t kM = 192;
constexpr std::int64_t kN = 64;
constexpr std::int64_t kK = 16;
constexpr std::int64_t kTile = 16;

std::unique_ptr<GemmOperator> make_operator(Context& context, const std::string& op, bool is_wrong) {
  GemmOptions gemm{.m = kM, .n = kN, .k = kK, .tile_m = kTile, .tile_n = is_wrong ? 2 * kTile : kTile};
  if (op == "all-gather-gemm") return std::make_unique<AllGatherGemm>(context, gemm);
  if (op == "tail-free") return std::make_unique<GemmReduceScatter>(context, gemm, OverlapMethod::kTailFree);
  gemm.partition = {16, 16, 16};
  if (op == "gemm-all-reduce") return std::make_unique<GemmAllReduce>(context, gemm);
  if (op == "gemm-reduce-scatter") return std::make_unique<GemmReduceScatter>(context, gemm);
  std::vector<std::int32_t> destinations;
  for (std::int64_t row = 0; row < kM; ++row) {
    destinations.push_back(static_cast<std::int32_t>(row % context.communicator().size()));
  }
  return std::make_unique<GemmAllToAll>(context, gemm, destinations);
}

/// A[i,k] = 1 and B[n,k] = rank + 1 + n. What a gather brings is not there before it.
class GemmWork : public Work {
 public:
  GemmWork(Context& context, const std::string& op, bool is_wrong)
      : op_(op),
        rank_(context.communicator().rank()),
        num_ranks_(context.communicator().size()),
        operator_(make_operator(context, op, is_wrong)),
        a_(kM * kK, 1.0F),
        b_(kN * kK),
        out_(static_cast<std::size_t>(operator_->output_rows() * kN)) {
    for (std::size_t i = 0; i < b_.size(); ++i) {
      b_[i] = static_cast<float>(rank_ + 1) + static_cast<float>(i / kK);
    }
  }

  void call() override {
    poison();
    Operands operands;
    operands.a = a_.data();
    operands.lda = kK;
    operands.b = b_.data();
    operands.ldb = kK;
    operands.out = out_.data();
    operands.ldo = kN;
    (*operator_)(operands);
    for (std::int64_t row = 0; row < operator_->output_rows(); ++row) {
      for (std::int64_t col = 0; col < kN; ++col) {
        if (out_[static_cast<std::size_t>(row * kN + col)] != expected(row, col)) {
          throw std::logic_error("a result is wrong");
        }
      }
    }
  }

 private:
  void poison() {
    std::fill(out_.begin(), out_.end(), -1.0F);
    if (const auto* gather = dynamic_cast<const AllGatherGemm*>(operator_.get())) {
      std::fill(a_.begin(), a_.end(), -1.0F);
      const auto own = a_.begin() + gather->first_row() * kK;
      std::fill(own, own + gather->num_rows() * kK, 1.0F);
    }
  }

  [[nodiscard]] float expected(std::int64_t row, std::int64_t col) const {
    const auto product_of = [&](std::int64_t rank) { return kK * static_cast<float>(rank + 1 + col); };
    if (op_ == "all-gather-gemm") return product_of(rank_);
    // Rows come from rank 0, 1, … in equal shares.
    if (op_ == "gemm-all-to-all") return product_of(row / (operator_->output_rows() / num_ranks_));
    float sum = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) sum += product_of(rank);
    return sum;
  }

  std::string op_;
  int rank_;
  int num_ranks_;
  std::unique_ptr<GemmOperator> operator_;
  std::vector<float> a_;
  std::vector<float> b_;
  std::vector<float> out_;
};

}  // namespace

std::unique_ptr<Work> make_gemm_work(Context& context, const std::string& op, bool is_wrong) {
  return std::make_unique<GemmWork>(context, op, is_wrong);
}

std::unique_ptr<Work> make_work(Context& context, const std::string& op, bool is_wrong) {
  return op == "moe-layer" ? make_moe_work(context, is_wrong) : make_gemm_work(context, op, is_wrong);
}

}  // namespace flashoverlap::test
