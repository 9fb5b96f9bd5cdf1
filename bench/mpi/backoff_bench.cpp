// What ways of waiting for messages cost: latency against processor time.
//
//   mpirun -n 2 mpi_backoff_bench
//
// Columns, medians: *ping* half a round trip of one element between two ranks; *reduce* an all-reduce of 4
// MiB; *late* from a message's sending to the receiver's going on, when the receiver had waited 20 ms for it;
// *busy* the processor time of the waiting thread per second of waiting; *shared* an all-reduce of 4 MiB
// while a thread computes on every core.
#include <fmt/format.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/mpi/backoff.h"
#include "core/median.h"
#include "flashoverlap/mpi.h"

namespace flashoverlap::bench {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::int64_t kElements = 1 << 20;

double now_us() {
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

double processor_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Two ranks' measurements. Rank 0's are printed.
class Measurement {
 public:
  explicit Measurement(const std::shared_ptr<Communicator>& communicator)
      : communicator_(*communicator), stream_(communicator_.make_stream("bench")), data_(kElements, 1.0F) {}

  double ping_us() {
    return median_of(300,
                     [&] {
                       if (is_first()) {
                         send(1);
                         receive(1);
                       } else {
                         receive(1);
                         send(1);
                       }
                     }) /
           2;
  }

  double reduce_us(int repetitions) {
    return median_of(repetitions, [&] {
      communicator_.all_reduce(data_.data(), data_.data(), kElements, DType::kFloat32, *stream_, {});
      stream_->synchronize();
    });
  }

  /// The clocks are one: both ranks are on this host.
  double late_us() {
    std::vector<double> samples;
    for (int i = 0; i < 20; ++i) {
      start();
      double moment = 0;
      if (is_first()) {
        receive(1);
        moment = now_us();
      } else {
        std::this_thread::sleep_for(milliseconds{20});
        moment = now_us();
        send(1);
      }
      const auto sent = communicator_.exchange(static_cast<std::uint64_t>(moment), {})[1];
      samples.push_back(moment - static_cast<double>(sent));
    }
    return core::median(samples);
  }

  double busy() {
    start();
    const double begin = processor_seconds();
    const double begin_us = now_us();
    if (is_first()) {
      receive(1);
    } else {
      std::this_thread::sleep_for(milliseconds{2000});
      send(1);
    }
    return (processor_seconds() - begin) / (now_us() - begin_us) * 1e6;
  }

  double shared_us() {
    std::atomic<bool> stop{false};
    // One thread for each core: half of them from either rank.
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < (std::thread::hardware_concurrency() + 1) / 2; ++i) {
      threads.emplace_back([&] {
        volatile double x = 1;
        while (!stop) x = x * 1.0000001;
      });
    }
    const double us = reduce_us(30);
    stop = true;
    for (std::thread& thread : threads) thread.join();
    return us;
  }

 private:
  [[nodiscard]] bool is_first() const { return communicator_.rank() == 0; }
  void start() { communicator_.exchange(std::uint64_t{0}, {}); }
  void send(int peer_of_first) {
    communicator_.send(data_.data(), 1, DType::kFloat32, is_first() ? peer_of_first : 0, *stream_, {});
    stream_->synchronize();
  }
  void receive(int peer_of_first) {
    communicator_.receive(data_.data(), 1, DType::kFloat32, is_first() ? peer_of_first : 0, *stream_, {});
    stream_->synchronize();
  }
  double median_of(int repetitions, const std::function<void()>& call) {
    std::vector<double> samples;
    start();
    for (int i = 0; i < repetitions; ++i) {
      const double begin = now_us();
      call();
      samples.push_back(now_us() - begin);
    }
    return core::median(samples);
  }

  Communicator& communicator_;
  std::unique_ptr<Stream> stream_;
  std::vector<float> data_;
};

void measure() {
  const auto communicator = make_mpi_communicator();
  if (communicator->size() != 2) throw std::runtime_error("start it with mpirun -n 2");
  const bool prints = communicator->rank() == 0;
  const comm::mpi::BackoffPolicy now;
  struct Candidate {
    std::string name;
    comm::mpi::BackoffPolicy policy;
  };
  const auto candidate = [&](std::int64_t poll_us, bool yields, std::int64_t first_us,
                             std::int64_t longest_us) {
    return comm::mpi::BackoffPolicy{microseconds{poll_us}, yields, microseconds{first_us},
                                    microseconds{longest_us}};
  };
  const std::vector<Candidate> candidates = {
      {"as it is", now},
      {"yields 30 us", candidate(30, true, 20, 1000)},
      {"yields only", candidate(60'000'000, true, 20, 1000)},
      {"sleeps only", candidate(0, false, 20, 1000)},
      {"polls 10 us", candidate(10, false, 20, 1000)},
      {"polls 30 us", candidate(30, false, 20, 1000)},
      {"polls 100 us", candidate(100, false, 20, 1000)},
      {"polls 30, from 5", candidate(30, false, 5, 1000)},
      {"polls 30, from 100", candidate(30, false, 100, 1000)},
      {"up to 100 us", candidate(30, false, 20, 100)},
      {"up to 300 us", candidate(30, false, 20, 300)},
      {"up to 10 ms", candidate(30, false, 20, 10'000)},
  };
  if (prints) {
    fmt::print("# {}; {}\n{:<18} {:>9} {:>10} {:>9} {:>7} {:>10}\n", mpi_library_name(), "us; busy in cores",
               "policy", "ping", "reduce", "late", "busy", "shared");
  }
  for (const Candidate& each : candidates) {
    comm::mpi::Backoff::policy = each.policy;
    Measurement measurement(communicator);
    const double ping = measurement.ping_us();
    const double reduce = measurement.reduce_us(50);
    const double late = measurement.late_us();
    const double busy = measurement.busy();
    const double shared = measurement.shared_us();
    if (!prints) continue;
    fmt::print("{:<18} {:>9.1f} {:>10.0f} {:>9.0f} {:>7.3f} {:>10.0f}\n", each.name, ping, reduce, late, busy,
               shared);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace flashoverlap::bench

int main() {
  try {
    flashoverlap::bench::measure();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "mpi_backoff_bench: {}\n", error.what());
    return 1;
  }
}
