#include "plan/agreement.h"

namespace flashoverlap::plan {
namespace {

/// Raise when the layout that a builder chooses for the same options changes.
constexpr std::int64_t kFormatVersion = 1;

constexpr std::uint64_t kFnvPrime = 0x100000001b3U;
constexpr std::uint64_t kMix = 0xff51afd7ed558ccdU;  // MurmurHash3's 64-bit finaliser.

}  // namespace

void AgreementHash::add(std::uint64_t word) {
  state_ = (state_ ^ word) * kFnvPrime;
  state_ ^= state_ >> 33U;
  state_ *= kMix;
  state_ ^= state_ >> 33U;
}

void AgreementHash::add(std::string_view text) {
  add(static_cast<std::uint64_t>(text.size()));
  for (const char c : text) add(static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
}

void AgreementHash::add(std::span<const std::int64_t> words) {
  add(static_cast<std::uint64_t>(words.size()));
  for (const std::int64_t word : words) add(word);
}

void AgreementHash::add(std::span<const std::int32_t> words) {
  add(static_cast<std::uint64_t>(words.size()));
  for (const std::int32_t word : words) add(static_cast<std::int64_t>(word));
}

AgreementHash hash_options(std::string_view operation, const PlanOptions& options,
                           std::span<const std::int64_t> partition) {
  AgreementHash hash;
  hash.add(kFormatVersion);
  hash.add(operation);
  hash.add(static_cast<std::int64_t>(options.world_size));
  hash.add(name_of(options.dtype));
  hash.add(options.m);
  hash.add(options.n);
  hash.add(options.k);
  hash.add(options.tile_m);
  hash.add(options.tile_n);
  hash.add(options.swizzle);
  hash.add(options.resources.compute_units);
  hash.add(partition);
  return hash;
}

}  // namespace flashoverlap::plan
