#include "tune_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "plan/agreement.h"

namespace flashoverlap::cli {
namespace {

TransferKind collective_of(Op op) {
  switch (op) {
    case Op::kGemmAllReduce:
      return TransferKind::kAllReduce;
    case Op::kGemmReduceScatter:
      return TransferKind::kReduceScatter;
    case Op::kGemmAllToAll:
      return TransferKind::kAllToAll;
  }
  return TransferKind::kAllReduce;
}

}  // namespace

TuneRequest tune_request(const ProblemOptions& problem, const MachineProfile& machine, std::int64_t units) {
  TuneRequest request;
  request.collective = collective_of(problem.op);
  request.world_size = problem.ranks;
  request.m = problem.m;
  request.n = problem.n;
  request.k = problem.k;
  request.dtype = problem.dtype;
  request.rows = problem.rows;
  request.slice_sizes = problem.slices.sizes;
  request.routing = make_routing(problem);
  request.units = units;
  const std::int64_t swizzle = problem.swizzle == 0 ? 1 : problem.swizzle;
  if (problem.tile_m != 0 || problem.tile_n != 0) {
    // One side given: the other from the machine's kernels.
    for (const GemmKernel& kernel : machine.gemm.kernels) {
      if (kernel.dtype != problem.dtype) continue;
      const TileShape tile{problem.tile_m != 0 ? problem.tile_m : kernel.tile_m,
                           problem.tile_n != 0 ? problem.tile_n : kernel.tile_n, swizzle};
      if (std::find(request.tiles.begin(), request.tiles.end(), tile) == request.tiles.end()) {
        request.tiles.push_back(tile);
      }
    }
  } else if (problem.swizzle != 0) {
    for (const GemmKernel& kernel : machine.gemm.kernels) {
      if (kernel.dtype == problem.dtype) request.tiles.push_back({kernel.tile_m, kernel.tile_n, swizzle});
    }
  }
  return request;
}

std::string tuning_variant(const ProblemOptions& problem) {
  if (problem.op == Op::kGemmReduceScatter) return std::string(name_of(problem.rows));
  if (problem.op != Op::kGemmAllToAll) return {};
  plan::AgreementHash hash;
  for (const auto& rows : make_routing(problem).destinations) hash.add(std::span<const std::int32_t>(rows));
  return fmt::format("routing {:016x}", hash.value());
}

}  // namespace flashoverlap::cli
