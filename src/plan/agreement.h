#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "flashoverlap/plan_builders.h"

namespace flashoverlap::plan {

/// 64-bit hash of what all ranks of a call must pass alike. FNV-1a over 64-bit words with a
/// multiply-xor-shift finish per word, so that one changed bit reaches all of the result; not for
/// adversaries.
class AgreementHash {
 public:
  void add(std::uint64_t word);
  void add(std::int64_t word) { add(static_cast<std::uint64_t>(word)); }
  void add(std::string_view text);
  void add(std::span<const std::int64_t> words);
  void add(std::span<const std::int32_t> words);
  [[nodiscard]] std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325U;
};

/// Hash of the operation and all options but `rank`; `partition` is the one in force. Includes the plans'
/// format version, so that ranks with different builds of this library do not agree by accident.
AgreementHash hash_options(std::string_view operation, const PlanOptions& options,
                           std::span<const std::int64_t> partition);

}  // namespace flashoverlap::plan
