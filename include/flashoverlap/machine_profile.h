#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/bandwidth_curve.h"
#include "flashoverlap/gemm_profile.h"
#include "flashoverlap/plan.h"

/// What the predictor, the search and the simulator know of a machine. JSON schema: docs/machine-profile.md.
namespace flashoverlap {

/// Where a profile's numbers come from, and what must be the same for a tuning result to hold.
struct Provenance {
  std::string kind;  ///< "measured", "published" or "estimated"; parts may say otherwise in their own source.
  std::string date;  ///< ISO 8601 day of the measurement or publication.
  std::string device;
  std::string driver;
  std::map<std::string, std::string> libraries;  ///< Name to version.
  std::vector<std::string> sources;
  bool operator==(const Provenance&) const = default;
};

/// A measured curve: one collective over `world_size` ranks on `units` communication units. `bytes` of its
/// points is the whole buffer of one rank: all-reduce and reduce-scatter: what goes in; all-gather: what
/// comes out; all-to-all: what goes in, the rank's own part included; send and put: the message.
struct CommunicationCurve {
  TransferKind collective = TransferKind::kAllReduce;
  std::int64_t world_size = 1;
  std::int64_t units = 0;      ///< Communication units per rank that it was measured with.
  std::optional<DType> dtype;  ///< Not set: holds for every type (equal bytes take equal time).
  BandwidthCurve curve;
  std::string source;
  bool operator==(const CommunicationCurve&) const = default;
};

/// One level of the network, from the inside out: NVLink or PCIe in a node, the fabric between nodes.
///
/// A domain of level l holds `ranks` consecutive ranks and consists of domains of level l - 1 (level 0: of
/// single ranks). Each of those inner domains has `ports` ports of `bandwidth_gbps` per direction to this
/// level: with one port per rank transfers of different ranks do not share (NVLink; rail-optimised NICs);
/// with fewer they do. Rank i of an inner domain uses port i modulo ports.
struct TopologyLevel {
  std::string name;
  std::int64_t ranks = 0;     ///< 0, on the last level only: any number.
  std::int64_t ports = 0;     ///< Per inner domain; 0: one per rank.
  double latency_us = 0;      ///< Of one call that crosses this level.
  double bandwidth_gbps = 0;  ///< Of one port, per direction.
  bool latency_grows =
      false;  ///< Multiply the latency by ceil(log2(inner domains taking part)), as trees do.
  std::string source;
  bool operator==(const TopologyLevel&) const = default;
};

struct MachineProfile {
  std::string name;
  std::string description;
  Provenance provenance;
  std::int64_t units = 1;  ///< SMs or CPU threads of one rank.
  GemmProfile gemm;
  double signal_us = 0;  ///< From a group's last tile to the start of its transfer.
  double restore_us_per_mib =
      0;  ///< The pass that puts received data in order, per MiB of output; 0: fused, not counted.
  /// GEMM time while communication runs beside it / alone, >= 1: memory and cache that both use.
  double slowdown = 1;
  /// Computing time lost per MiB that is communicated: communication that runs on the computing cores, as on
  /// CPUs.
  double steal_us_per_mib = 0;
  std::vector<CommunicationCurve> curves;
  std::vector<TopologyLevel> levels;
  bool operator==(const MachineProfile&) const = default;

  /// The most specific measured curve: same collective, world size and units, same dtype before any dtype.
  /// Null: none.
  [[nodiscard]] const CommunicationCurve* measured_curve(TransferKind collective, std::int64_t world_size,
                                                         std::int64_t communication_units, DType dtype) const;

  /// The measured curve or, without one, the ideal one that the topology gives (docs/machine-profile.md has
  /// the formulas; on a single level they are those of `LinkModel`). Throws Error(kBadArgument) when the
  /// profile has neither, listing what it has, and for a world size < 2 or beyond the topology.
  [[nodiscard]] BandwidthCurve curve(TransferKind collective, std::int64_t world_size,
                                     std::int64_t communication_units, DType dtype) const;

  /// Numbers of communication units for which there are curves of this collective and world size, ascending;
  /// {0} if none.
  [[nodiscard]] std::vector<std::int64_t> communication_unit_choices(TransferKind collective,
                                                                     std::int64_t world_size) const;
};

/// Reads a profile. Throws Error(kFile) naming `origin`, the field, its value and what it must be: not JSON,
/// cut off, another schema version, a missing, unknown or ill-typed field, a number out of range, a curve
/// without points, two kernels of the same dtype and tile. Unsorted, repeated or non-monotone points are
/// repaired as BandwidthCurve documents.
[[nodiscard]] MachineProfile parse_machine_profile(std::string_view json, const std::string& origin);

/// Reads a file, or a shipped profile by its name (see shipped_machine_profiles). A name with '/' or ending
/// in ".json" is a path. Throws Error(kFile) for a file that cannot be read, Error(kBadArgument) for an
/// unknown name, listing the known ones.
[[nodiscard]] MachineProfile load_machine_profile(const std::string& name_or_path);

/// Names of the profiles that ship with the library (folder profiles/, compiled in), sorted.
[[nodiscard]] std::vector<std::string> shipped_machine_profiles();

/// JSON that parse_machine_profile reads back to an equal profile.
[[nodiscard]] std::string to_json(const MachineProfile& profile);

}  // namespace flashoverlap
