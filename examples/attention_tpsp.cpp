// Attention with tensor parallelism and sequence parallelism (TPSP) on four ranks, two heads each;
// layers/attention_tpsp.cpp has the layer. Attention is computed query slice by query slice, and each slice's
// output projection goes to its rank while attention of the next runs (arXiv 2604.24013). Here ranks are
// threads of this process; the result is checked against the whole layer in float64.
#include "layers/layer.h"

int main() {
  using namespace flashoverlap;
  return layers::run_example(4, [](Context& context) {
    return layers::make_attention_tpsp(context, {.tokens = 150, .heads = 8, .head_size = 16});
  });
}
