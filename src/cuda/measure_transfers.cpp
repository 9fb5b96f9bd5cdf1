#include "measure_transfers.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <ctime>
#include <exception>

#include "check.h"
#include "core/fail.h"
#include "core/median.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::int64_t kSmallest = 64 << 10;  // bytes
constexpr std::int64_t kLargest = 256LL << 20;
constexpr std::int64_t kElement = 2;
constexpr DType kType = DType::kBFloat16;

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// An all-reduce by copies receives every rank's whole buffer.
std::int64_t receive_bytes(const RankPlacement& placement) {
  const bool copies = placement.transport == Transport::kCopyEngine;
  return copies ? kLargest * std::ssize(placement.devices) : kLargest;
}

}  // namespace

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

double slowest_of(Communicator& communicator, double value) {
  double slowest = 0;
  for (const std::uint64_t bits :
       communicator.exchange(std::bit_cast<std::uint64_t>(value), {.operation = "the slowest rank"})) {
    slowest = std::max(slowest, std::bit_cast<double>(bits));
  }
  return slowest;
}

TransferMeter::TransferMeter(std::shared_ptr<Communicator> communicator, const RankPlacement& placement,
                             std::int64_t repetitions, PeerAddresses& addresses)
    : communicator_(std::move(communicator)),
      placement_(placement),
      repetitions_(repetitions),
      addresses_(addresses),
      stream_(options().device, CudaStream::Priority::kHigh, options().partition.communication),
      send_(options().device, kLargest, "what is sent"),
      receive_(options().device, receive_bytes(placement), "what is received"),
      begin_(true),
      end_(true) {
  const auto rank = as_index(communicator_->rank());
  addresses.receive[rank] = receive_.data();
  addresses.device[rank] = options().device;
  FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(send_.data(), 0, kLargest, stream_.get()));
  stream_.synchronize();
  meet();
}

// Nobody copies into this rank's memory any more; but where this rank has failed, nobody should wait for it
// either.
TransferMeter::~TransferMeter() {
  if (std::uncaught_exceptions() > exceptions_) {
    communicator_->abort("another rank failed while bandwidth curves were measured");
    return;
  }
  try {
    meet();
  } catch (const Error&) {  // a rank that failed told its own error
  }
}

const CudaOptions& TransferMeter::options() const {
  return placement_.ranks[as_index(communicator_->rank())];
}

void TransferMeter::meet() {
  (void)communicator_->exchange(std::uint64_t{0}, {.operation = "bandwidth curves"});
}

CommunicationCurve TransferMeter::measure(TransferKind kind) {
  std::vector<CurvePoint> points;
  for (std::int64_t bytes = kSmallest; bytes <= kLargest; bytes *= 2) points.push_back(point(kind, bytes));
  const bool takes_sms = kind != TransferKind::kPut && options().communication_sms > 0;
  return {.collective = kind,
          .world_size = communicator_->size(),
          .units = takes_sms ? placement_.max_ctas : 0,
          .dtype = std::nullopt,
          .curve = BandwidthCurve(std::move(points), std::string(name_of(kind))),
          .source = source(kind)};
}

std::string TransferMeter::source(TransferKind kind) const {
  std::string what = fmt::format("{}, also what it takes to start", name_of(placement_.transport));
  if (kind == TransferKind::kPut) what = "cudaMemcpyPeerAsync to the next rank";
  return fmt::format("measured on {}: {}, medians of {}, bf16, all ranks at once, the slowest", today(), what,
                     repetitions_);
}

CurvePoint TransferMeter::point(TransferKind kind, std::int64_t bytes) {
  const std::int64_t share = bytes / kElement / communicator_->size() / 8 * 8;
  const std::int64_t count = share * communicator_->size();
  constexpr int kCalls = 4;  // of a batch
  call(kind, share);
  stream_.synchronize();
  std::vector<double> times;
  for (std::int64_t i = 0; i < repetitions_; ++i) {
    meet();
    begin_.record(stream_.get());
    for (int j = 0; j < kCalls; ++j) call(kind, share);
    end_.record(stream_.get());
    stream_.synchronize();
    float ms = 0;
    FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
    times.push_back(slowest_of(*communicator_, static_cast<double>(ms) * 1e3 / kCalls));
  }
  std::sort(times.begin(), times.end());
  const std::size_t n = times.size();
  return {.bytes = static_cast<double>(count * kElement),
          .time_us = core::median(times),
          .spread_us = (times[n * 3 / 4] - times[n / 4]) / 2};
}

// `share`: elements of a rank's part of the buffer.
void TransferMeter::call(TransferKind kind, std::int64_t share) {
  Communicator& ranks = *communicator_;
  const int world = ranks.size();
  const TransferLabel label{.operation = "bandwidth curves"};
  const std::vector<std::int64_t> counts(as_index(world), share);
  const auto next = as_index((ranks.rank() + 1) % world);
  const auto at = [&](const DeviceBuffer& buffer) {
    return static_cast<char*>(buffer.data()) + share * ranks.rank() * kElement;
  };
  const bool copies = options().sums == SumBy::kRestore;
  switch (kind) {
    case TransferKind::kAllReduce:
      if (!copies)
        return ranks.all_reduce(send_.data(), receive_.data(), share * world, kType, stream_, label);
      return ranks.all_gather(send_.data(), receive_.data(), std::vector(as_index(world), share * world),
                              kType, stream_, label);
    case TransferKind::kReduceScatter:
      if (!copies) return ranks.reduce_scatter(send_.data(), at(send_), counts, kType, stream_, label);
      return ranks.all_to_all(send_.data(), counts, receive_.data(), counts, kType, stream_, label);
    case TransferKind::kAllGather:
      return ranks.all_gather(at(receive_), receive_.data(), counts, kType, stream_, label);
    case TransferKind::kAllToAll:
      return ranks.all_to_all(send_.data(), counts, receive_.data(), counts, kType, stream_, label);
    case TransferKind::kSend: {
      std::vector<std::int64_t> sends(counts.size(), 0);
      std::vector<std::int64_t> receives(counts.size(), 0);
      sends[next] = share * world;
      receives[as_index((ranks.rank() + world - 1) % world)] = share * world;
      return ranks.all_to_all(send_.data(), sends, receive_.data(), receives, kType, stream_, label);
    }
    case TransferKind::kPut:
      FLASHOVERLAP_CUDA_CHECK(cudaMemcpyPeerAsync(addresses_.receive[next], addresses_.device[next],
                                                  send_.data(), options().device,
                                                  as_index(share * world * kElement), stream_.get()));
      return;
    default:
      core::fail(ErrorKind::kInternal, "transfers of kind {} are not measured", name_of(kind));
  }
}

}  // namespace flashoverlap::cuda
