#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <span>

#include "core/fail.h"
#include "flashoverlap/moe_plan.h"
#include "plan/arithmetic.h"

namespace flashoverlap {
namespace {

using plan::index;

constexpr std::string_view kKindNames[] = {"balanced", "moderate", "stress"};

/// In [0, 1). Not a std distribution: those differ between libraries.
double uniform(std::mt19937_64& random) {
  return static_cast<double>(random() >> 11U) * 0x1p-53;
}

/// Draws distinct experts for one token after the other, in proportion to `shares`.
class Chooser {
 public:
  explicit Chooser(const std::vector<double>& shares) : sums_(shares.size()) {
    std::partial_sum(shares.begin(), shares.end(), sums_.begin());
  }

  void choose(std::mt19937_64& random, std::span<std::int32_t> experts) const {
    for (std::size_t slot = 0; slot < experts.size(); ++slot) {
      const auto taken = [&](std::int32_t expert) {
        return std::ranges::find(experts.first(slot), expert) != experts.first(slot).end();
      };
      constexpr int kTries = 64;  // then the next free expert: what is left is nearly all improbable
      std::int32_t expert = draw(random);
      for (int i = 0; i < kTries && taken(expert); ++i) expert = draw(random);
      while (taken(expert)) expert = (expert + 1) % static_cast<std::int32_t>(sums_.size());
      experts[slot] = expert;
    }
  }

 private:
  std::int32_t draw(std::mt19937_64& random) const {
    const auto at = std::ranges::upper_bound(sums_, uniform(random) * sums_.back());
    return static_cast<std::int32_t>(std::min(at - sums_.begin(), std::ssize(sums_) - 1));
  }

  std::vector<double> sums_;
};

std::vector<double> shares_of(RoutingKind kind, std::int32_t world_size, std::int64_t num_experts) {
  std::vector<double> shares(index(num_experts));
  const std::int64_t hot = std::max<std::int64_t>(1, first_expert(num_experts, world_size, 1));
  for (std::int64_t e = 0; e < num_experts; ++e) {
    if (kind == RoutingKind::kModerate) shares[index(e)] = 1 / std::sqrt(static_cast<double>(e + 1));
    if (kind != RoutingKind::kStress) continue;
    shares[index(e)] = e < hot ? 1 / static_cast<double>(hot) : 1 / static_cast<double>(num_experts - hot);
  }
  return shares;
}

/// The same number of slots for each expert: slot i of all ranks goes to expert (i * stride) mod E. The
/// stride has no factor in common with E, and spreads the slots of one token over the ranks.
void fill_balanced(MoeRouting& routing, std::int32_t rank) {
  const std::int64_t experts = routing.num_experts;
  std::int64_t stride = std::max<std::int64_t>(1, experts / routing.top_k);
  while (std::gcd(stride, experts) != 1) ++stride;
  const std::int64_t slots = std::ssize(routing.experts);
  const std::int64_t first = slots % experts * rank % experts;
  for (std::int64_t i = 0; i < slots; ++i) {
    routing.experts[index(i)] = static_cast<std::int32_t>((first + i) % experts * stride % experts);
  }
}

}  // namespace

std::string_view name_of(RoutingKind kind) {
  return kKindNames[static_cast<std::size_t>(kind)];
}

RoutingKind parse_routing_kind(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kKindNames); ++i) {
    if (name == kKindNames[i]) return static_cast<RoutingKind>(i);
  }
  core::fail(ErrorKind::kBadArgument, "routing '{}' is not known; balanced, moderate or stress is expected",
             name);
}

MoeRouting make_routing(RoutingKind kind, std::int32_t rank, std::int32_t world_size, std::int64_t tokens,
                        std::int64_t num_experts, std::int32_t top_k, std::uint64_t seed) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    core::fail(ErrorKind::kBadArgument, "rank {} of {} ranks does not exist", rank, world_size);
  }
  if (top_k > num_experts) {
    core::fail(ErrorKind::kBadArgument, "top_k is {}, but there are {} experts", top_k, num_experts);
  }
  MoeRouting routing{tokens, num_experts, top_k, {}, {}};
  if (tokens >= 0 && top_k >= 1 && plan::product(tokens, top_k)) {
    routing.experts.assign(index(tokens * top_k), -1);
    routing.weights.assign(index(tokens * top_k), 0.0F);
  }
  check_routing(routing);
  std::seed_seq sequence{seed & 0xffffffffU, seed >> 32U, static_cast<std::uint64_t>(rank)};
  std::mt19937_64 random(sequence);
  if (kind == RoutingKind::kBalanced) {
    fill_balanced(routing, rank);
  } else {
    const Chooser chooser(shares_of(kind, world_size, num_experts));
    for (std::int64_t token = 0; token < tokens; ++token) {
      chooser.choose(random, std::span(routing.experts).subspan(index(token * top_k), index(top_k)));
    }
  }
  for (std::int64_t token = 0; token < tokens; ++token) {
    const auto weights = std::span(routing.weights).subspan(index(token * top_k), index(top_k));
    double sum = 0;
    for (float& weight : weights)
      sum += static_cast<double>(weight = static_cast<float>(0.5 + uniform(random)));
    for (float& weight : weights) weight = static_cast<float>(static_cast<double>(weight) / sum);
  }
  return routing;
}

}  // namespace flashoverlap
