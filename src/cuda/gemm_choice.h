// Which compiled signal GEMM carries out a plan.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "flashoverlap/dtype.h"
#include "flashoverlap/executor.h"
#include "signal_gemm.h"

namespace flashoverlap::cuda {

/// The variants that run on `device` for `dtype`, sm_90a ones first.
[[nodiscard]] std::vector<const SignalGemmVariant*> variants_for(int device, DType dtype);

/// Those of them whose tile is tile_m x tile_n. `name` set: that variant alone. Error(kUnsupported) listing
/// the tiles there are when there is none, or when `dtype` is float32.
[[nodiscard]] std::vector<const SignalGemmVariant*> variants_with_tile(int device, DType dtype,
                                                                       std::int64_t tile_m,
                                                                       std::int64_t tile_n,
                                                                       std::string_view name);

/// The variant that should be quickest: by its measured speed, what it computes in vain at the edges of [m,
/// n] and in the last wave on `gemm_sms` SMs, and what a tile costs besides its products. On an H200 0.3 %
/// from the best of all on average. `aligned`: rows of A and B begin at multiples of 16 bytes.
[[nodiscard]] const SignalGemmVariant& choose_variant(int device, DType dtype, std::int64_t m, std::int64_t n,
                                                      std::int64_t k, int gemm_sms, bool aligned,
                                                      std::string_view name);

/// The same for a product of groups of rows, each with one of several weights [n, k]: groups[r] are the rows
/// of rank r's, and the busiest rank counts. Tiles do not cross groups. The same on ranks with equal devices.
[[nodiscard]] const SignalGemmVariant& choose_grouped_variant(
    int device, DType dtype, std::span<const std::vector<std::int64_t>> groups, std::int64_t n,
    std::int64_t k, int gemm_sms, std::string_view name);

}  // namespace flashoverlap::cuda
