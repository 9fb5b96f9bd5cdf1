#include "registered_layout.h"

#include <algorithm>
#include <initializer_list>

namespace flashoverlap::cuda {
namespace {

bool is_in_workspace(const Region& region) {
  return region.count == 0 || region.buffer == BufferKind::kPacked || region.buffer == BufferKind::kReceived;
}

/// FNV-1a over whole numbers; never 0.
class Hash {
 public:
  void add(std::initializer_list<std::int64_t> values) {
    for (const std::int64_t value : values) value_ = (value_ ^ static_cast<std::uint64_t>(value)) * kPrime;
  }
  [[nodiscard]] std::uint64_t value() const { return std::max<std::uint64_t>(value_, 1); }

 private:
  static constexpr std::uint64_t kPrime = 0x100000001B3;
  std::uint64_t value_ = 0xCBF29CE484222325;
};

}  // namespace

std::uint64_t registered_layout(const OverlapPlan& plan) {
  Hash layout;
  for (const Transfer& transfer : plan.transfers) {
    if (!is_in_workspace(transfer.source) || !is_in_workspace(transfer.destination)) return 0;
    const auto kind = static_cast<std::int64_t>(transfer.kind);
    // What a reduce-scatter writes, and an all-gather reads, is the rank's own affair.
    if (transfer.kind == TransferKind::kAllReduce || transfer.kind == TransferKind::kReduceScatter) {
      layout.add({kind, static_cast<std::int64_t>(transfer.source.buffer), transfer.source.offset});
    }
    if (transfer.kind == TransferKind::kAllReduce || transfer.kind == TransferKind::kAllGather) {
      layout.add({kind, static_cast<std::int64_t>(transfer.destination.buffer), transfer.destination.offset});
    }
  }
  return layout.value();
}

}  // namespace flashoverlap::cuda
