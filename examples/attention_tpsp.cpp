// Attention with tensor parallelism and sequence parallelism (TPSP) on four ranks, two heads each;
// layers/attention_tpsp.cpp has the layer. Attention is computed query slice by query slice, and each slice's
// output projection goes to its rank while attention of the next runs (arXiv 2604.24013). Here ranks are
// threads of this process, with --cuda on its GPUs; the result is checked against the whole layer in float64.
#include "layers/layer.h"

int main(int argc, char** argv) {
  using namespace flashoverlap;
  return layers::run_example(argc, argv, 4, [](layers::Place& place) {
    return layers::make_attention_tpsp(place, {.tokens = 150, .heads = 8, .head_size = 16});
  });
}
