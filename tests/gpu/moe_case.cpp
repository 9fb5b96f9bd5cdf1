#include "moe_case.h"

#include <algorithm>
#include <sstream>

namespace flashoverlap::gpu_test {

std::string MoeCase::text() const {
  std::ostringstream text;
  text << "H=" << options.hidden << " I=" << options.intermediate << " E=" << options.num_experts << " "
       << flashoverlap::name_of(options.dtype) << (options.gated ? " gated " : " ")
       << flashoverlap::name_of(options.activation) << " " << flashoverlap::name_of(options.transport)
       << " groups " << options.collective_groups << " consumers " << options.consumers << " bands "
       << options.segment_bands << " seed " << seed << " top_k " << routings.front().top_k << " tokens";
  for (const MoeRouting& routing : routings) text << " " << routing.tokens;
  return text.str();
}

MoeCase random_case(std::mt19937_64& rng, int world, std::int64_t most_tokens) {
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
  };
  MoeCase call;
  call.seed = rng() % 100'000;
  call.options.hidden = 8 * pick(2, 40);  // some have several columns of tiles
  call.options.intermediate = 8 * pick(1, 20);
  call.options.num_experts = pick(1, 9);  // some ranks may have none
  call.options.dtype = pick(0, 1) == 0 ? DType::kBFloat16 : DType::kFloat16;
  call.options.gated = pick(0, 1) == 0;
  call.options.activation = pick(0, 1) == 0 ? Activation::kSilu : Activation::kGelu;
  call.options.transport = MoeTransport::kCollective;
  call.options.collective_groups = pick(1, 4);
  call.options.poison_workspace = true;
  const auto top_k = static_cast<std::int32_t>(pick(1, std::min<std::int64_t>(3, call.options.num_experts)));
  const auto kind = static_cast<RoutingKind>(pick(0, 2));
  for (std::int32_t rank = 0; rank < world; ++rank) {
    const std::int64_t tokens = pick(0, 4) == 0 ? 0 : pick(1, most_tokens);
    call.routings.push_back(
        make_routing(kind, rank, world, tokens, call.options.num_experts, top_k, call.seed));
    for (std::int32_t& expert : call.routings.back().experts) {
      if (pick(0, 9) == 0) expert = -1;  // no expert
    }
  }
  return call;
}

MoeCase small_case(int world) {
  MoeCase call;
  call.options.hidden = 64;
  call.options.intermediate = 32;
  call.options.num_experts = 4;
  call.options.dtype = DType::kBFloat16;
  call.options.transport = MoeTransport::kCollective;
  for (std::int32_t rank = 0; rank < world; ++rank)
    call.routings.push_back(make_routing(RoutingKind::kBalanced, rank, world, 50, 4, 2, 1));
  return call;
}

MoeCase with_puts(MoeCase call, std::mt19937_64& rng) {
  call.options.transport = MoeTransport::kPut;
  call.options.consumers = 1 + static_cast<std::int64_t>(rng() % 20);
  call.options.segment_bands = 1 + static_cast<std::int64_t>(rng() % 3);
  return call;
}

test::MoeModel model_of(const MoeCase& call) {
  std::mt19937_64 rng(call.seed);
  return test::random_model(rng, call.options);
}

test::Values tokens_of(const MoeCase& call, int rank) {
  std::mt19937_64 rng(call.seed * 1000 + static_cast<std::uint64_t>(rank));
  return test::random_values(rng, call.routings[index(rank)].tokens * call.options.hidden, call.options.dtype,
                             1.0F);
}

DeviceMatrix on_device(const test::Values& values, std::int64_t begin, std::int64_t rows, std::int64_t cols,
                       std::int64_t padding) {
  DeviceMatrix matrix(rows, cols, cols + padding, values.dtype);
  std::vector<float> floats(index(rows * cols));
  for (std::int64_t i = 0; i < rows * cols; ++i) floats[index(i)] = values.get(begin + i);
  matrix.fill(floats);
  return matrix;
}

}  // namespace flashoverlap::gpu_test
