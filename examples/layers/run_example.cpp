#include <flashoverlap/in_process.h>

#include <cstdio>
#include <functional>
#include <string_view>

#include "layer.h"
#ifdef FLASHOVERLAP_CUDA
#include "cuda_place.h"
#endif

namespace flashoverlap::layers {
namespace {

using OnRank = std::function<void(Place&)>;

void run_on_cpu(int ranks, const OnRank& on_rank) {
  run_ranks(ranks, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context(communicator);
    HostPlace place(context);
    on_rank(place);
  });
}

#ifndef FLASHOVERLAP_CUDA
void run_on_gpus(int /*ranks*/, const OnRank& /*on_rank*/) {
  throw Error(ErrorKind::kUnsupported,
              "--cuda: this build has no GPU executor; build with the preset cuda (-DFLASHOVERLAP_CUDA=ON)");
}
#endif

}  // namespace

int run_example(int argc, char** argv, int ranks, std::unique_ptr<Layer> (*make)(Place&)) try {
  const bool on_gpus = argc == 2 && std::string_view(argv[1]) == "--cuda";
  if (argc > 1 && !on_gpus) {
    std::fprintf(stderr, "usage: %s [--cuda]\n", argv[0]);
    return 2;
  }
  std::vector<double> errors(static_cast<std::size_t>(ranks));  // Each rank writes its own.
  std::vector<double> limits(errors.size());
  const auto on_rank = [&](Place& place) {
    const auto rank = static_cast<std::size_t>(place.rank());
    const std::unique_ptr<Layer> layer = make(place);
    layer->run();
    errors[rank] = layer->error();
    limits[rank] = layer->largest_error();
  };
  if (on_gpus) {
    run_on_gpus(ranks, on_rank);
  } else {
    run_on_cpu(ranks, on_rank);
  }
  bool correct = true;
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    std::printf("rank %zu: differs from the whole layer in float64 by %.1e of the largest value\n", rank,
                errors[rank]);
    correct = correct && errors[rank] <= limits[rank];
  }
  return correct ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s: %s\n", name_of(error.kind()), error.what());
  return 1;
}

}  // namespace flashoverlap::layers
