#include "flashoverlap/moe_routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "core/fail.h"
#include "core/half.h"
#include "plan/arithmetic.h"

namespace flashoverlap {
namespace {

using plan::index;

void check_shape(std::int64_t tokens, std::int64_t num_experts, std::int32_t top_k) {
  if (tokens < 0)
    core::fail(ErrorKind::kBadArgument, "routing has {} tokens; at least 0 are expected", tokens);
  if (num_experts < 1 || num_experts > std::numeric_limits<std::int32_t>::max()) {
    core::fail(ErrorKind::kBadArgument, "routing has {} experts; 1 to 2^31 - 1 are expected", num_experts);
  }
  if (top_k < 1) core::fail(ErrorKind::kBadArgument, "routing has top_k {}; at least 1 is expected", top_k);
  if (!plan::product(tokens, top_k)) {
    core::fail(ErrorKind::kBadArgument, "routing of {} tokens with top_k {} does not fit in 64 bits", tokens,
               top_k);
  }
}

/// One token's logits as float64, and its scores; a closed expert has score 0.
class Scores {
 public:
  Scores(std::int64_t num_experts, GateFunction function)
      : function_(function),
        row_(index(num_experts)),
        logits_(index(num_experts)),
        scores_(index(num_experts)) {}

  void load(const void* logits, std::int64_t ld, DType dtype, std::int64_t token) {
    const auto* from = static_cast<const std::byte*>(logits) + token * ld * size_of(dtype);
    core::to_float(from, dtype, row_.data(), std::ssize(row_));
    for (std::size_t e = 0; e < row_.size(); ++e) {
      if (std::isnan(row_[e]) || row_[e] == std::numeric_limits<float>::infinity()) {
        core::fail(
            ErrorKind::kBadArgument,
            "logit of token {} for expert {} is {}; a number, or -infinity to close the expert, is expected",
            token, e, row_[e]);
      }
      logits_[e] = static_cast<double>(row_[e]);
    }
    function_ == GateFunction::kSoftmax ? softmax() : sigmoid();
  }

  [[nodiscard]] bool open(std::size_t expert) const { return std::isfinite(logits_[expert]); }
  [[nodiscard]] double logit(std::size_t expert) const { return logits_[expert]; }
  [[nodiscard]] double score(std::size_t expert) const { return scores_[expert]; }
  [[nodiscard]] std::size_t size() const { return scores_.size(); }

 private:
  void softmax() {
    const double largest = *std::ranges::max_element(logits_);
    double sum = 0;
    for (std::size_t e = 0; e < logits_.size(); ++e) {
      scores_[e] = open(e) ? std::exp(logits_[e] - largest) : 0;
      sum += scores_[e];
    }
    for (double& score : scores_) score = sum > 0 ? score / sum : 0;
  }

  void sigmoid() {
    for (std::size_t e = 0; e < logits_.size(); ++e)
      scores_[e] = open(e) ? 1 / (1 + std::exp(-logits_[e])) : 0;
  }

  GateFunction function_;
  std::vector<float> row_;
  std::vector<double> logits_;
  std::vector<double> scores_;
};

void check_gate(const void* logits, std::int64_t ld, std::int64_t tokens, std::int64_t num_experts,
                const GateOptions& options) {
  check_shape(tokens, num_experts, options.top_k);
  if (options.top_k > num_experts) {
    core::fail(ErrorKind::kBadArgument, "top_k is {}, but there are {} experts", options.top_k, num_experts);
  }
  if (ld < num_experts) {
    core::fail(ErrorKind::kBadArgument,
               "ld of the logits is {}; at least {}, the number of experts, is expected", ld, num_experts);
  }
  if (logits == nullptr && tokens > 0) core::fail(ErrorKind::kBadArgument, "logits is null");
}

}  // namespace

std::string_view name_of(GateFunction function) {
  return function == GateFunction::kSoftmax ? "softmax" : "sigmoid";
}

void check_routing(const MoeRouting& routing) {
  check_shape(routing.tokens, routing.num_experts, routing.top_k);
  const std::int64_t slots = routing.tokens * routing.top_k;
  if (std::ssize(routing.experts) != slots || std::ssize(routing.weights) != slots) {
    core::fail(ErrorKind::kBadArgument,
               "routing of {} tokens with top_k {} has {} experts and {} weights; {} of each are expected",
               routing.tokens, routing.top_k, routing.experts.size(), routing.weights.size(), slots);
  }
  for (std::int64_t i = 0; i < slots; ++i) {
    const std::int32_t expert = routing.experts[index(i)];
    const std::int64_t token = i / routing.top_k;
    if (expert < -1 || expert >= routing.num_experts) {
      core::fail(ErrorKind::kBadArgument,
                 "token {}, slot {} has expert {}; an expert in [0, {}), or -1 for none, is expected", token,
                 i % routing.top_k, expert, routing.num_experts);
    }
    if (expert >= 0 && !std::isfinite(routing.weights[index(i)])) {
      core::fail(ErrorKind::kBadArgument, "token {}, slot {} has weight {}; a finite number is expected",
                 token, i % routing.top_k, routing.weights[index(i)]);
    }
  }
}

MoeRouting route_tokens(const void* logits, std::int64_t ld, std::int64_t tokens, std::int64_t num_experts,
                        DType dtype, const GateOptions& options) {
  check_gate(logits, ld, tokens, num_experts, options);
  MoeRouting routing{tokens, num_experts, options.top_k, {}, {}};
  routing.experts.assign(index(tokens * options.top_k), -1);
  routing.weights.assign(index(tokens * options.top_k), 0.0F);
  Scores scores(num_experts, options.function);
  std::vector<std::size_t> order(scores.size());
  for (std::int64_t token = 0; token < tokens; ++token) {
    scores.load(logits, ld, dtype, token);
    std::iota(order.begin(), order.end(), std::size_t{0});
    // By logit, which orders as the scores do but does not run out of precision.
    std::ranges::partial_sort(order, order.begin() + options.top_k, [&](std::size_t a, std::size_t b) {
      return scores.logit(a) != scores.logit(b) ? scores.logit(a) > scores.logit(b) : a < b;
    });
    double sum = 0;
    for (std::int32_t slot = 0; slot < options.top_k; ++slot) sum += scores.score(order[index(slot)]);
    for (std::int32_t slot = 0; slot < options.top_k && scores.open(order[index(slot)]); ++slot) {
      const std::size_t at = index(token * options.top_k + slot);
      const double score = scores.score(order[index(slot)]);
      const double weight = options.renormalise ? (sum > 0 ? score / sum : 0) : score;
      routing.experts[at] = static_cast<std::int32_t>(order[index(slot)]);
      routing.weights[at] = static_cast<float>(weight);
    }
  }
  return routing;
}

std::vector<float> route_gradient(const void* logits, std::int64_t ld, DType dtype,
                                  const GateOptions& options, const MoeRouting& routing,
                                  const std::vector<float>& weight_gradient) {
  check_gate(logits, ld, routing.tokens, routing.num_experts, options);
  check_routing(routing);
  if (options.top_k != routing.top_k || weight_gradient.size() != routing.weights.size()) {
    core::fail(
        ErrorKind::kBadArgument,
        "the gate has top_k {}, the routing top_k {} and {} weights, and there are {} gradients of weights; "
        "equal ones are expected",
        options.top_k, routing.top_k, routing.weights.size(), weight_gradient.size());
  }
  std::vector<float> gradient(index(routing.tokens * routing.num_experts), 0.0F);
  Scores scores(routing.num_experts, options.function);
  std::vector<double> by_score(scores.size());
  for (std::int64_t token = 0; token < routing.tokens; ++token) {
    scores.load(logits, ld, dtype, token);
    std::ranges::fill(by_score, 0.0);
    double sum = 0;
    double mean = 0;  // of the gradients, weighted with the renormalised weights
    const auto each_slot = [&](const auto& visit) {
      for (std::int32_t slot = 0; slot < routing.top_k; ++slot) {
        const std::int32_t expert = routing.expert(token, slot);
        if (expert < 0) continue;
        visit(index(expert), static_cast<double>(weight_gradient[index(token * routing.top_k + slot)]));
      }
    };
    each_slot([&](std::size_t expert, double) { sum += scores.score(expert); });
    each_slot([&](std::size_t expert, double by_weight) {
      if (sum > 0) mean += by_weight * scores.score(expert) / sum;
    });
    each_slot([&](std::size_t expert, double by_weight) {
      if (!options.renormalise) by_score[expert] += by_weight;
      if (options.renormalise && sum > 0) by_score[expert] += (by_weight - mean) / sum;
    });
    double common = 0;
    for (std::size_t e = 0; e < scores.size(); ++e) common += by_score[e] * scores.score(e);
    for (std::size_t e = 0; e < scores.size(); ++e) {
      const double score = scores.score(e);
      const double by_logit = options.function == GateFunction::kSoftmax ? score * (by_score[e] - common)
                                                                         : by_score[e] * score * (1 - score);
      gradient[index(token) * scores.size() + e] = static_cast<float>(by_logit);
    }
  }
  return gradient;
}

}  // namespace flashoverlap
