#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashoverlap/communicator.h"
#include "flashoverlap/in_process.h"

/// Measured calls on links that are paced such that overlap has something to hide.
namespace flashoverlap::cli {

struct LinkChoice {
  bool is_auto = true;  ///< See matching_link.
  LinkModel model{.bandwidth_gbps = 0, .latency_us = 10};
};

/// --link-gbps and --link-latency-us. `choice` must outlive parsing.
void add_link_options(CLI::App& sub, LinkChoice& choice);

/// The link on which each slice's communication takes 0.9 of its computation, where `computation_us` is that
/// of all `ranks` slices and `bytes` are sent by a rank, in `exchanges` (one a GEMM) of all slices but one.
LinkModel matching_link(double bytes, double computation_us, std::int64_t ranks, std::int64_t exchanges,
                        double latency_us);

/// "paced to 1.2 GB/s and 10 us per transfer".
std::string text_of(const LinkModel& link);

/// What the first calls took longer than the second, pair by pair of one iteration, which see the same
/// machine: the median difference, at least 0.
double exposed_us(const std::vector<double>& total_us, const std::vector<double>& alone_us);

/// "1.2 ms, exposed communication 0.1 ms (8.3 % of it)"
std::string text_of_exposed(double total_us, double exposed_us, double communication_us);

/// "0.7 ms  (the longer of GEMM and communication), 0.95 of it reached". `computation`: what it is called.
std::string text_of_bound(double bound_us, double total_us, const char* computation);

/// Until all ranks are here. Collective.
void meet(Communicator& communicator);

/// The slowest rank's time of one call. Collective.
double slowest_us(Communicator& communicator, const std::function<void()>& call);

}  // namespace flashoverlap::cli
