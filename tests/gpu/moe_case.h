// Layers of experts, as the GPU tests call them.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "flashoverlap/moe_layer.h"
#include "flashoverlap/moe_routing.h"
#include "gpu_matrix.h"
#include "ops/moe_reference.h"

namespace flashoverlap::gpu_test {

inline std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

struct MoeCase {
  MoeLayerOptions options;
  std::vector<MoeRouting> routings;  ///< By rank.
  std::uint64_t seed = 1;

  [[nodiscard]] std::string text() const;
};

/// Up to `most_tokens` on each rank, or none; some ranks may have no expert, some slots none.
MoeCase random_case(std::mt19937_64& rng, int world, std::int64_t most_tokens = 300);
MoeCase small_case(int world);
/// The case with transport `put`, some consumers and segments.
MoeCase with_puts(MoeCase call, std::mt19937_64& rng);

/// The case's weights, all experts', and a rank's tokens.
test::MoeModel model_of(const MoeCase& call);
test::Values tokens_of(const MoeCase& call, int rank);

/// Rows of `values` from element `begin` on, with `padding` elements between them.
DeviceMatrix on_device(const test::Values& values, std::int64_t begin, std::int64_t rows, std::int64_t cols,
                       std::int64_t padding = 0);

}  // namespace flashoverlap::gpu_test
