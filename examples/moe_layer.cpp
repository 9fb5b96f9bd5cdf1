// A mixture-of-experts layer on four ranks, which here are threads of this process: tokens are routed to
// experts on all ranks, and both transfers, of the tokens to their experts and of the results back, are
// hidden behind the experts' GEMMs.
#include <flashoverlap/in_process.h>
#include <flashoverlap/moe_layer.h>

#include <cstdio>
#include <memory>
#include <vector>

int main() try {
  constexpr int kRanks = 4;
  flashoverlap::run_ranks(kRanks, {}, [](const std::shared_ptr<flashoverlap::Communicator>& communicator) {
    flashoverlap::Context context(communicator);
    flashoverlap::MoeLayerOptions options;
    options.hidden = 128;
    options.intermediate = 256;
    options.num_experts = 8;
    flashoverlap::MoeLayer layer(context, options);  // SwiGLU experts; two on each rank here

    constexpr std::int64_t kTokens = 100;
    const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
    const std::vector<float> x(size(kTokens * options.hidden), 0.5F);  // [tokens, hidden]
    std::vector<float> out(x.size());
    // [experts here, 2 * intermediate, hidden] and [experts here, hidden, intermediate]
    const std::vector<float> up(size(layer.local_experts() * 2 * options.intermediate * options.hidden),
                                0.01F);
    const std::vector<float> down(size(layer.local_experts() * options.hidden * options.intermediate), 0.01F);

    // A gate would give logits [tokens, experts]; these prefer expert (token mod 8), then the one behind it.
    std::vector<float> logits(size(kTokens * options.num_experts), 0.0F);
    for (std::int64_t token = 0; token < kTokens; ++token) {
      logits[size(token * options.num_experts + token % options.num_experts)] = 2;
    }
    const flashoverlap::MoeRouting routing =
        flashoverlap::route_tokens(logits.data(), options.num_experts, kTokens, options.num_experts,
                                   flashoverlap::DType::kFloat32, {.top_k = 2, .renormalise = true});
    const flashoverlap::MoeReport report = layer.forward(
        x.data(), options.hidden, routing, {up.data(), down.data()}, out.data(), options.hidden);

    // Every expert is the same here: g = 128 * 0.5 * 0.01 = 0.64, silu(g) * g = 0.268, times 256 * 0.01.
    if (communicator->rank() == 0) {
      std::printf(
          "out[0, 0] = %.3f; expected 0.687\n%lld rows for %lld choices of experts: none is dropped\n",
          static_cast<double>(out[0]), static_cast<long long>(report.send_rows),
          kTokens * static_cast<long long>(routing.top_k));
    }
  });
  return 0;
} catch (const flashoverlap::Error& error) {
  std::fprintf(stderr, "%s: %s\n", flashoverlap::name_of(error.kind()), error.what());
  return 1;
}
