// A linear layer whose weight is spread over four data-parallel ranks, forward and backward;
// layers/linear_dp.cpp has the layer (arXiv 2604.24013). Here ranks are threads of this process, with --cuda
// on its GPUs; both results are checked against the whole layer in float64.
#include "layers/layer.h"

int main(int argc, char** argv) {
  using namespace flashoverlap;
  return layers::run_example(argc, argv, 4,
                             [](layers::Place& place) { return layers::make_linear_dp(place, {}); });
}
