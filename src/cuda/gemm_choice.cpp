#include "gemm_choice.h"

#include <algorithm>
#include <limits>
#include <string>

#include "check.h"
#include "core/fail.h"

namespace flashoverlap::cuda {
namespace {

int compute_capability(int device) {
  int major = 0;
  int minor = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major * 10 + minor;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Area that the units compute, including what is computed in vain at the edges and while others work on the
// last wave.
std::int64_t computed_area(const SignalGemmVariant& variant, std::int64_t m, std::int64_t n, int gemm_sms) {
  const std::int64_t tiles = ceil_div(m, variant.tile_rows) * ceil_div(n, variant.tile_cols);
  const std::int64_t units = std::max(1, gemm_sms / variant.blocks_per_tile);
  return ceil_div(tiles, units) * units * variant.tile_rows * variant.tile_cols;
}

double cost_of(const SignalGemmVariant& variant, std::int64_t area, std::int64_t k) {
  return static_cast<double>(area) * variant.relative_time * static_cast<double>(k + variant.overhead_k);
}

}  // namespace

std::vector<const SignalGemmVariant*> variants_for(int device, DType dtype) {
  const int capability = compute_capability(device);
  const GemmType type = dtype == DType::kFloat16 ? GemmType::kFp16 : GemmType::kBf16;
  std::vector<const SignalGemmVariant*> found;
  if (dtype == DType::kFloat32) return found;
  for (const SignalGemmVariant* variant : signal_gemm_variants()) {
    const bool runs = variant->exact_capability ? capability == variant->min_compute_capability
                                                : capability >= variant->min_compute_capability;
    if (runs && variant->type == type) found.push_back(variant);
  }
  std::stable_sort(found.begin(), found.end(), [](const SignalGemmVariant* a, const SignalGemmVariant* b) {
    return a->min_compute_capability > b->min_compute_capability;
  });
  return found;
}

std::vector<const SignalGemmVariant*> variants_with_tile(int device, DType dtype, std::int64_t tile_m,
                                                         std::int64_t tile_n, std::string_view name) {
  if (dtype == DType::kFloat32) {
    core::fail(ErrorKind::kUnsupported, "the GPU executor computes bf16 and f16, not f32");
  }
  const std::vector<const SignalGemmVariant*> all = variants_for(device, dtype);
  std::vector<const SignalGemmVariant*> found;
  std::string have;
  for (const SignalGemmVariant* variant : all) {
    have += fmt::format("{}{}x{} ({})", have.empty() ? "" : ", ", variant->tile_rows, variant->tile_cols,
                        variant->name);
    const bool is_named = name.empty() || name == variant->name;
    if (is_named && variant->tile_rows == tile_m && variant->tile_cols == tile_n) found.push_back(variant);
  }
  if (found.empty()) {
    core::fail(
        ErrorKind::kUnsupported,
        "no {} signal GEMM{}{} with tiles of {}x{} runs on device {} (compute capability {}); there are: {}",
        name_of(dtype), name.empty() ? "" : " named ", name, tile_m, tile_n, device,
        compute_capability(device), have.empty() ? "none" : have);
  }
  return found;
}

const SignalGemmVariant& choose_variant(int device, DType dtype, std::int64_t m, std::int64_t n,
                                        std::int64_t k, int gemm_sms, bool aligned, std::string_view name) {
  const SignalGemmVariant* best = nullptr;
  double best_cost = std::numeric_limits<double>::max();
  for (const SignalGemmVariant* variant : variants_for(device, dtype)) {
    if (!aligned && variant->operand_alignment >= 8) continue;
    if (!name.empty() && name != variant->name) continue;
    if (variant->blocks_per_tile > gemm_sms) continue;
    const double cost = cost_of(*variant, computed_area(*variant, m, n, gemm_sms), k);
    if (cost < best_cost) {
      best = variant;
      best_cost = cost;
    }
  }
  if (best == nullptr) {
    core::fail(
        ErrorKind::kUnsupported,
        "no signal GEMM{}{} for {} runs on device {} (compute capability {}) with {} SMs and {} operands",
        name.empty() ? "" : " named ", name, name_of(dtype), device, compute_capability(device), gemm_sms,
        aligned ? "16-byte aligned" : "misaligned");
  }
  return *best;
}

const SignalGemmVariant& choose_grouped_variant(int device, DType dtype,
                                                std::span<const std::vector<std::int64_t>> groups,
                                                std::int64_t n, std::int64_t k, int gemm_sms,
                                                std::string_view name) {
  const SignalGemmVariant* best = nullptr;
  double best_cost = std::numeric_limits<double>::max();
  for (const SignalGemmVariant* variant : variants_for(device, dtype)) {
    if (k % variant->operand_alignment != 0 || variant->blocks_per_tile > gemm_sms) continue;
    if (!name.empty() && name != variant->name) continue;
    const std::int64_t units = gemm_sms / variant->blocks_per_tile;
    std::int64_t most_turns = 0;
    for (const std::vector<std::int64_t>& of_rank : groups) {
      std::int64_t tiles = 0;
      for (const std::int64_t rows : of_rank)
        tiles += ceil_div(rows, variant->tile_rows) * ceil_div(n, variant->tile_cols);
      most_turns = std::max(most_turns, ceil_div(tiles, units));
    }
    const double cost = cost_of(*variant, most_turns * units * variant->tile_rows * variant->tile_cols, k);
    if (cost < best_cost) {
      best = variant;
      best_cost = cost;
    }
  }
  if (best == nullptr) {
    core::fail(ErrorKind::kUnsupported,
               "no {} signal GEMM{}{} with {} columns to add over runs on {} SMs of device {}",
               name_of(dtype), name.empty() ? "" : " named ", name, k, gemm_sms, device);
  }
  return *best;
}

}  // namespace flashoverlap::cuda
