#include "paced_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "core/median.h"
#include "format.h"
#include "option_values.h"

namespace flashoverlap::cli {

void add_link_options(CLI::App& sub, LinkChoice& choice) {
  sub.add_option_function<std::string>(
         "--link-gbps",
         [&choice](const std::string& text) {
           choice.is_auto = text == "auto";
           constexpr double kMost = 1e6;
           if (!choice.is_auto) choice.model.bandwidth_gbps = parse_number("--link-gbps", text, 0, kMost);
         },
         "Pace each rank's link to so many 1e9 bytes a second; 0: not paced;\n"
         "auto: such that a slice's communication takes 0.9 of its computation")
      ->type_name("auto|NUMBER")
      ->default_str("auto");
  constexpr double kMostUs = 1e6;
  add_number(sub, "--link-latency-us", choice.model.latency_us, 0, kMostUs, "Latency of each transfer")
      ->default_str("10");
}

LinkModel matching_link(double bytes, double computation_us, std::int64_t ranks, std::int64_t exchanges,
                        double latency_us) {
  constexpr double kShare = 0.9;
  if (bytes == 0) return {};
  const double of_slices_us = computation_us * static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  const double transfer_us =
      std::max(1.0, kShare * of_slices_us - static_cast<double>(ranks * exchanges) * latency_us);
  return {.bandwidth_gbps = bytes / transfer_us / 1e3, .latency_us = latency_us};
}

std::string text_of(const LinkModel& link) {
  if (link.bandwidth_gbps == 0) return "not paced: copies in memory";
  return fmt::format("paced to {:.3g} GB/s and {:.3g} us per transfer", link.bandwidth_gbps, link.latency_us);
}

double exposed_us(const std::vector<double>& total_us, const std::vector<double>& alone_us) {
  std::vector<double> differences;
  for (std::size_t i = 0; i < total_us.size(); ++i) differences.push_back(total_us[i] - alone_us[i]);
  return std::max(0.0, core::median(differences));
}

std::string text_of_exposed(double total_us, double exposed_us, double communication_us) {
  const double share = communication_us > 0 ? exposed_us / communication_us : 0;
  return fmt::format("{}, exposed communication {} ({:.1f} % of it)", text_of_us(total_us),
                     text_of_us(exposed_us), 100 * share);
}

std::string text_of_bound(double bound_us, double total_us, const char* computation) {
  return fmt::format("{}  (the longer of {} and communication), {:.2f} of it reached", text_of_us(bound_us),
                     computation, total_us > 0 ? bound_us / total_us : 0);
}

void meet(Communicator& communicator) {
  communicator.exchange(std::uint64_t{0}, {.operation = "start of a checked call"});
}

double slowest_us(Communicator& communicator, const std::function<void()>& call) {
  communicator.exchange(std::uint64_t{0}, {.operation = "start of a measured call"});
  const auto begin = std::chrono::steady_clock::now();
  call();
  const double own =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  std::uint64_t slowest = 0;
  for (const std::uint64_t ns :
       communicator.exchange(static_cast<std::uint64_t>(own * 1000), {.operation = "time of a call"})) {
    slowest = std::max(slowest, ns);
  }
  return static_cast<double>(slowest) / 1000;
}

}  // namespace flashoverlap::cli
