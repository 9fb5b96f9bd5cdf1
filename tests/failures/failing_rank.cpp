// One rank, or all ranks as threads, of a run in which one rank fails on purpose. Started by failure_matrix.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "failures/work.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/mpi.h"

namespace flashoverlap::test {
namespace {

using namespace std::chrono_literals;

struct Options {
  std::string fault;  // none, throw, exit, kill, stop, cut, slow, wrong-plan, out-of-memory
  std::string stage;  // start, planned, group, last
  std::string op;     // see make_work
  int victim = 1;
  int ranks = 0;  // threads; 0: this process is one rank of an MPI job
  std::chrono::milliseconds timeout{2000};
  std::string folder;  // for what happened
};

constexpr std::int64_t kTransferInTheMiddle = 1;
constexpr int kCalls = 3;

std::int64_t now_ms() {
  using std::chrono::system_clock;
  return std::chrono::duration_cast<std::chrono::milliseconds>(system_clock::now().time_since_epoch())
      .count();
}

void write(const Options& options, const std::string& name, const std::string& text) {
  const std::string path = options.folder + "/" + name;
  {
    std::ofstream file(path + ".part");
    file << now_ms() << '\n' << text << '\n';
  }
  if (std::rename((path + ".part").c_str(), path.c_str()) != 0) std::abort();
}

/// The fault of one rank. Happens once.
class Fault {
 public:
  Fault(const Options& options, int rank) : options_(options), is_victim_(rank == options.victim) {}

  void at(const std::string& stage) {
    if (!is_victim_ || options_.stage != stage || has_happened_.exchange(true)) return;
    write(options_, "fault", options_.fault);
    happen();
  }

  [[nodiscard]] bool is_victim() const { return is_victim_; }

 private:
  void happen() const {
    const std::string& fault = options_.fault;
    if (fault == "throw") throw std::runtime_error("thrown on purpose");
    if (fault == "out-of-memory") throw std::bad_alloc();
    if (fault == "slow") return std::this_thread::sleep_for(options_.timeout / 2);
    if (fault == "exit") {
      if (options_.ranks == 0) std::exit(3);
      throw Left{};
    }
    if (fault == "kill") {
      if (options_.ranks == 0) ::raise(SIGKILL);
      throw Left{};
    }
    if (fault == "cut") {
      // This process has a host, that is a network namespace, to itself.
      if (std::system("ip link set data0 down") != 0) std::abort();
    }
    if (fault == "stop") {
      // A thread that does not come back while the others wait.
      if (options_.ranks > 0) return std::this_thread::sleep_for(options_.timeout + 3s);
      ::raise(SIGSTOP);
    }
  }

 public:
  /// A thread's way to end without a word: it leaves its communicator and returns.
  struct Left {};

 private:
  const Options& options_;
  bool is_victim_;
  std::atomic<bool> has_happened_{false};
};

void run_calls(const std::shared_ptr<Communicator>& communicator, const Options& options, Fault& fault) {
  fault.at("start");
  ContextOptions context_options;
  context_options.num_threads = 1;
  context_options.poison_workspace = true;
  context_options.hooks.before_transfer = [&](std::int64_t transfer) {
    if (transfer == kTransferInTheMiddle) fault.at("group");
  };
  if (fault.is_victim() && options.fault == "out-of-memory" && options.stage == "limit") {
    context_options.workspace_limit_bytes = 1;
    write(options, "fault", options.fault);
  }
  Context context(communicator, context_options);
  const bool wrong = fault.is_victim() && options.fault == "wrong-plan";
  if (wrong) write(options, "fault", options.fault);
  const auto work = make_work(context, options.op, wrong);
  fault.at("planned");
  for (int call = 0; call < kCalls; ++call) {
    work->call();
    fault.at("last");
  }
}

/// Runs and writes down how it ended. False for an error.
bool report(const std::shared_ptr<Communicator>& communicator, const Options& options) {
  const std::string name = fmt::format("rank{}", communicator->rank());
  Fault fault(options, communicator->rank());
  try {
    run_calls(communicator, options, fault);
    write(options, name, "ok");
    return true;
  } catch (const Error& error) {
    write(options, name, fmt::format("{}\n{}", name_of(error.kind()), error.what()));
  } catch (const Fault::Left&) {
    write(options, name, "left");
  } catch (const std::exception& error) {
    communicator->abort(error.what());
    write(options, name, fmt::format("own error\n{}", error.what()));
  }
  return false;
}

int run(const Options& options) {
  if (options.ranks == 0) {
    // Starting four jobs at a time on few cores may take longer than the faults' time-out.
    const auto communicator = make_mpi_communicator({.timeout = 30s});
    communicator->set_timeout(options.timeout);
    return report(communicator, options) ? 0 : 1;
  }
  InProcessOptions in_process;
  in_process.timeout = options.timeout;
  std::atomic<bool> all_right{true};
  try {
    run_ranks(options.ranks, in_process, [&](std::shared_ptr<Communicator> communicator) {
      if (!report(communicator, options)) all_right = false;
    });
  } catch (const Error&) {
    all_right = false;
  }
  // Where all live, a new context works after a failure.
  Options again = options;
  again.fault = "none";
  std::atomic<bool> again_right{true};
  run_ranks(options.ranks, in_process, [&](std::shared_ptr<Communicator> communicator) {
    Fault fault(again, -1);
    try {
      run_calls(communicator, again, fault);
    } catch (const std::exception&) {
      again_right = false;
    }
  });
  write(options, "again", again_right ? "ok" : "failed");
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace flashoverlap::test

int main(int argc, char** argv) {
  using namespace flashoverlap::test;
  if (argc != 8) {
    std::fprintf(stderr, "usage: failing_rank FAULT STAGE OP VICTIM THREADS TIMEOUT_MS FOLDER\n");
    return 2;
  }
  Options options;
  options.fault = argv[1];
  options.stage = argv[2];
  options.op = argv[3];
  options.victim = std::stoi(argv[4]);
  options.ranks = std::stoi(argv[5]);
  options.timeout = std::chrono::milliseconds(std::stoi(argv[6]));
  options.folder = argv[7];
  return run(options);
}
