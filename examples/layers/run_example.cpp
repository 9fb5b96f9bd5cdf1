#include <flashoverlap/in_process.h>

#include <cstdio>

#include "layer.h"

namespace flashoverlap::layers {

int run_example(int ranks, std::unique_ptr<Layer> (*make)(Context&)) try {
  std::vector<double> errors(static_cast<std::size_t>(ranks));  // Each rank writes its own.
  std::vector<double> limits(errors.size());
  run_ranks(ranks, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context(communicator);
    const std::unique_ptr<Layer> layer = make(context);
    layer->run();
    errors[static_cast<std::size_t>(communicator->rank())] = layer->error();
    limits[static_cast<std::size_t>(communicator->rank())] = layer->largest_error();
  });
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
