// An MLP with tensor parallelism and sequence parallelism (TPSP) on four ranks; layers/mlp_tpsp.cpp has the
// layer. No communication is left at either end of its GEMMs (arXiv 2604.24013). Here ranks are threads of
// this process, with --cuda on its GPUs; the result is checked against the whole MLP in float64.
#include "layers/layer.h"

int main(int argc, char** argv) {
  using namespace flashoverlap;
  return layers::run_example(argc, argv, 4,
                             [](layers::Place& place) { return layers::make_mlp_tpsp(place, {}); });
}
