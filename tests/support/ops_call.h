#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "flashoverlap/in_process.h"
#include "flashoverlap/operators.h"
#include "support/matrix.h"

namespace flashoverlap::test {

/// Operands of a call without an epilogue.
inline Operands operands_of(const Matrix& a, const Matrix& b, Matrix& out) {
  Operands operands;
  operands.a = a.data();
  operands.lda = a.ld();
  operands.b = b.data();
  operands.ldb = b.ld();
  operands.out = out.data();
  operands.ldo = out.ld();
  return operands;
}

/// Runs `body(context, rank)` on `world_size` ranks in threads of this process, each with a context of its
/// own.
inline void on_ranks(int world_size, const std::function<void(Context&, int)>& body,
                     ContextOptions options = {}, const InProcessOptions& in_process = {}) {
  options.poison_workspace = true;
  run_ranks(world_size, in_process, [&](std::shared_ptr<Communicator> communicator) {
    Context context(communicator, options);
    body(context, communicator->rank());
  });
}

}  // namespace flashoverlap::test
