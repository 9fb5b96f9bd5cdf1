// A linear layer whose weight is spread over four data-parallel ranks, forward and backward;
// layers/linear_dp.cpp has the layer (arXiv 2604.24013). Here ranks are threads of this process; both results
// are checked against the whole layer in float64.
#include "layers/layer.h"

int main() {
  using namespace flashoverlap;
  return layers::run_example(4, [](Context& context) { return layers::make_linear_dp(context, {}); });
}
