#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/dtype.h"
#include "flashoverlap/plan.h"

/// Tuning results on disk: one file per machine, safe under any number of writers.
namespace flashoverlap {

/// What must be the same for a tuning result to hold.
struct MachineIdentity {
  std::string device;                            ///< Processor or GPU model.
  std::string driver;                            ///< Empty on CPUs.
  std::map<std::string, std::string> libraries;  ///< Name to version: BLAS, NCCL, …
  bool operator==(const MachineIdentity&) const = default;
};

/// What a result was tuned for. Nothing but exactly this may use it; `nearest` is the one exception, and says
/// so.
struct TuningKey {
  std::string operation;  ///< "gemm-all-reduce", …
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  DType dtype = DType::kFloat32;
  std::int64_t world_size = 1;
  std::int64_t units = 1;  ///< Of one rank.
  /// "any" from operators and the command: a call's epilogue is not known when its plan is chosen, and runs
  /// after the last transfer, where it takes the same time with every partition. Another text where a caller
  /// chooses by it.
  std::string epilogue;
  std::string variant;       ///< What else changes the plan: row ownership, routing.
  std::string communicator;  ///< "in-process 1 GB/s 50 us", "nccl", …
  bool operator==(const TuningKey&) const = default;
};

struct TuningEntry {
  TuningKey key;
  std::int64_t tile_m = 0;
  std::int64_t tile_n = 0;
  std::int64_t swizzle = 1;
  Resources resources;
  std::vector<std::int64_t> partition;
  double predicted_us = 0;
  double serial_us = 0;    ///< Predicted or measured, as `how` says.
  double measured_us = 0;  ///< 0: not measured.
  std::string how;         ///< "predicted" or "measured".
  std::string date;        ///< ISO 8601.
  bool operator==(const TuningEntry&) const = default;
};

/// "gemm-all-reduce m=4096 n=4096 k=1024 f32, 2 ranks x 4 units, epilogue any, in-process 1 GB/s 50 us".
[[nodiscard]] std::string to_text(const TuningKey& key);

/// Gets one line for each thing that was refused.
using WarningSink = std::function<void(const std::string&)>;

/// One file. Every entry carries the machine's identity, the version of this library and a checksum of all
/// its fields; entries that do not match are refused with a warning and never used: of another machine,
/// driver or library version; damaged or edited by hand. A file that is no such file at all (cut off, empty,
/// another schema) is refused as a whole, with a warning, and moved aside to PATH.refused by the next
/// `store`.
///
/// `store` locks PATH.lock, reads the file again, adds the entry, writes PATH.tmp, syncs it and renames it:
/// readers always see a complete file, concurrent writers lose nothing, and a writer that is killed leaves
/// the old file in place. Thread-safe as far as the file is: use one object per thread.
class TuningCache {
 public:
  /// `warn` may be null: warnings are dropped. The file need not exist.
  TuningCache(std::string path, MachineIdentity identity, WarningSink warn);

  /// The entry of exactly this key.
  [[nodiscard]] std::optional<TuningEntry> find(const TuningKey& key) const;

  /// The entry whose m, n, k are nearest (sum of |log ratios|), with everything else in the key but the
  /// communicator equal. Its partition fits its own shape: scale it (scaled_partition). nullopt when there is
  /// none, or none within a factor of 8 in all.
  [[nodiscard]] std::optional<TuningEntry> nearest(const TuningKey& key) const;

  /// Adds the entry or replaces the one of its key. Throws Error(kFile), naming path and reason, when it
  /// cannot be written, and Error(kBadArgument) for an entry that `find` would refuse.
  void store(const TuningEntry& entry);

  /// Entries that hold on this machine, in file order.
  [[nodiscard]] const std::vector<TuningEntry>& entries() const { return entries_; }
  [[nodiscard]] const std::string& path() const { return path_; }

  /// $FLASHOVERLAP_CACHE (a file), or tuning.json in $XDG_CACHE_HOME/flashoverlap or ~/.cache/flashoverlap.
  /// Empty when none of these variables is set.
  [[nodiscard]] static std::string default_path();

 private:
  std::string path_;
  MachineIdentity identity_;
  WarningSink warn_;
  std::vector<TuningEntry> entries_;
};

/// The entries of a cache file's text that hold for `identity`; `origin` names the file in warnings. Throws
/// Error(kFile) when the text is no cache file of this version.
[[nodiscard]] std::vector<TuningEntry> parse_tuning_cache(std::string_view json, const std::string& origin,
                                                          const MachineIdentity& identity,
                                                          const WarningSink& warn);

/// `partition` in the same proportions for another number of waves, with at most as many groups; sums to
/// `waves`.
[[nodiscard]] std::vector<std::int64_t> scaled_partition(const std::vector<std::int64_t>& partition,
                                                         std::int64_t waves);

}  // namespace flashoverlap
