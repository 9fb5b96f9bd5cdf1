// How long transfers between GPUs take: the curves of a machine profile.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "cuda_stream.h"
#include "device.h"
#include "flashoverlap/cuda_context.h"
#include "flashoverlap/machine_profile.h"
#include "rank_placement.h"

namespace flashoverlap::cuda {

/// Where each rank receives, so that its neighbour can copy there; one for all ranks of a process.
struct PeerAddresses {
  explicit PeerAddresses(std::size_t ranks) : receive(ranks), device(ranks) {}
  std::vector<void*> receive;
  std::vector<int> device;
};

/// One rank's side. All ranks make one, measure the same in the same order, and destroy it.
class TransferMeter {
 public:
  TransferMeter(std::shared_ptr<Communicator> communicator, const RankPlacement& placement,
                std::int64_t repetitions, PeerAddresses& addresses);
  ~TransferMeter();
  TransferMeter(const TransferMeter&) = delete;
  TransferMeter& operator=(const TransferMeter&) = delete;

  /// From 64 KiB to 256 MiB, all ranks at once; the slowest rank's times, medians. Collective. kPut: a copy
  /// by the copy engine to the next rank; kSend: a message to the next rank and one from the rank before.
  /// Where the restore kernel adds (Transport::kCopyEngine), an all-reduce and a reduce-scatter are the
  /// copies of what it adds.
  [[nodiscard]] CommunicationCurve measure(TransferKind kind);

 private:
  void meet();
  CurvePoint point(TransferKind kind, std::int64_t bytes);
  void call(TransferKind kind, std::int64_t share);
  [[nodiscard]] const CudaOptions& options() const;
  [[nodiscard]] std::string source(TransferKind kind) const;

  std::shared_ptr<Communicator> communicator_;
  const RankPlacement& placement_;
  std::int64_t repetitions_;
  PeerAddresses& addresses_;
  CudaStream stream_;
  DeviceBuffer send_, receive_;
  Event begin_, end_;
  int exceptions_ = std::uncaught_exceptions();  // those under way when this was made
};

/// The slowest rank's value, on every rank. Collective.
[[nodiscard]] double slowest_of(Communicator& communicator, double value);

/// ISO 8601, UTC.
[[nodiscard]] std::string today();

}  // namespace flashoverlap::cuda
