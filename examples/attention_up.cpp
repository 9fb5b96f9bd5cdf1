// Ulysses attention on four ranks, with six heads: layers/attention_up.cpp has the layer. The all-to-alls
// before and behind attention run while the projections do (arXiv 2604.24013). Here ranks are threads of this
// process, with --cuda on its GPUs; the result is checked against the whole layer in float64.
#include "layers/layer.h"

int main(int argc, char** argv) {
  using namespace flashoverlap;
  return layers::run_example(argc, argv, 4,
                             [](layers::Place& place) { return layers::make_attention_up(place, {}); });
}
