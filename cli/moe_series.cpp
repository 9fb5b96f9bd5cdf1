#include "moe_series.h"

#include <algorithm>
#include <chrono>

#include "core/median.h"
#include "process_ranks.h"

namespace flashoverlap::cli {
namespace {

/// Share of a transfer's own time that does not make the phase longer.
double share_hidden(double phase_us, double gemm_us, double transfer_us) {
  if (transfer_us <= 0) return 1;
  return std::clamp(1 - (phase_us - gemm_us) / transfer_us, 0.0, 1.0);
}

template <typename Item, typename Value>
double median_of(const std::vector<Item>& items, const Value& value) {
  std::vector<double> values;
  for (const Item& item : items) values.push_back(value(item));
  return core::median(values);
}

constexpr double MoePhases::*kPhases[] = {
    &MoePhases::counts_us,  &MoePhases::gather_us, &MoePhases::dispatch_us, &MoePhases::activation_us,
    &MoePhases::combine_us, &MoePhases::reduce_us, &MoePhases::weights_us};

}  // namespace

std::vector<double> slowest(Communicator& communicator, const std::vector<double>& own) {
  std::vector<double> worst = own;
  for (const std::vector<double>& other : gather(communicator, own)) {
    for (std::size_t i = 0; i < worst.size(); ++i) {
      if (!(other[i] <= worst[i])) worst[i] = other[i];
    }
  }
  return worst;
}

MoeLayer::Parts slowest(Communicator& communicator, const MoeLayer::Parts& own) {
  const std::vector<double> worst =
      slowest(communicator, std::vector{own.dispatch_gemm_us, own.dispatch_transfer_us, own.combine_gemm_us,
                                        own.combine_transfer_us, own.dispatch_us, own.combine_us});
  return {worst[0], worst[1], worst[2], worst[3], worst[4], worst[5]};
}

void MoeSeries::add(Communicator& communicator, const std::function<MoeReport()>& call) {
  communicator.exchange(std::uint64_t{0}, {.operation = "start of a measured call"});
  const auto begin = std::chrono::steady_clock::now();
  last_ = call();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  std::vector<double> own = {took.count(),
                             last_.phases.dispatch_us - last_.dispatch_work_us,
                             last_.phases.combine_us - last_.combine_work_us,
                             last_.dispatch_work_us + last_.combine_work_us,
                             last_.backlog_us,
                             last_.consumer_idle};
  for (const auto phase : kPhases) own.push_back(last_.phases.*phase);
  const std::vector<double> worst = slowest(communicator, own);
  Call& added = calls_.emplace_back(Call{.total_us = worst[0],
                                         .phases = {},
                                         .dispatch_us = worst[1],
                                         .combine_us = worst[2],
                                         .work_us = worst[3],
                                         .backlog_us = worst[4],
                                         .consumer_idle = worst[5]});
  for (std::size_t i = 0; i < std::size(kPhases); ++i) added.phases.*kPhases[i] = worst[6 + i];
}

double MoeSeries::median(const std::function<double(const Call&)>& value) const {
  return median_of(calls_, value);
}

MoePhases MoeSeries::phases() const {
  MoePhases medians;
  for (const auto phase : kPhases) {
    medians.*phase = median([&](const Call& call) { return call.phases.*phase; });
  }
  return medians;
}

double median_ratio(const MoeSeries& first, const MoeSeries& second,
                    const std::function<double(const MoeSeries::Call&)>& value) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < first.calls().size(); ++i) {
    const double below = value(second.calls()[i]);
    ratios.push_back(below > 0 ? value(first.calls()[i]) / below : 1);
  }
  return core::median(ratios);
}

void MoeHidden::add(const MoeLayer::Parts& parts, const MoeSeries::Call& overlapped) {
  dispatch_.push_back(
      share_hidden(overlapped.dispatch_us, parts.dispatch_gemm_us, parts.dispatch_transfer_us));
  combine_.push_back(share_hidden(overlapped.combine_us, parts.combine_gemm_us, parts.combine_transfer_us));
  parts_.push_back(parts);
}

double MoeHidden::dispatch() const {
  return core::median(dispatch_);
}

double MoeHidden::combine() const {
  return core::median(combine_);
}

MoeLayer::Parts MoeHidden::parts() const {
  const auto median = [&](double MoeLayer::Parts::*part) {
    return median_of(parts_, [&](const MoeLayer::Parts& parts) { return parts.*part; });
  };
  return {median(&MoeLayer::Parts::dispatch_gemm_us), median(&MoeLayer::Parts::dispatch_transfer_us),
          median(&MoeLayer::Parts::combine_gemm_us),  median(&MoeLayer::Parts::combine_transfer_us),
          median(&MoeLayer::Parts::dispatch_us),      median(&MoeLayer::Parts::combine_us)};
}

}  // namespace flashoverlap::cli
