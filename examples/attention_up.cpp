// Ulysses attention on four ranks, with six heads: layers/attention_up.cpp has the layer. The all-to-alls
// before and behind attention run while the projections do (arXiv 2604.24013). Here ranks are threads of this
// process; the result is checked against the whole layer in float64.
#include "layers/layer.h"

int main() {
  using namespace flashoverlap;
  return layers::run_example(4, [](Context& context) { return layers::make_attention_up(context, {}); });
}
