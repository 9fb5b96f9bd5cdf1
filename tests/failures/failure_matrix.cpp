// Runs every fault at every stage with every operator on every communicator, and prints what happened as a
// table.
//
//   failure_matrix FAILING_RANK [MPIEXEC [MPIEXEC ARGUMENT…]]
//
// A run is green when every surviving rank threw within the time-out plus 5 s, with a message that names the
// rank that failed and the operator, or, for a slow rank, when every result is right; and when no process is
// left.
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace flashoverlap::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kTimeoutMs = 2000;
constexpr std::int64_t kAllowedMs = kTimeoutMs + 5000;
// Beyond it a run counts as hung. Longer than allowed, so as to tell late from never.
constexpr auto kHungAfter = 60s;

struct Cell {
  std::string communicator;  // "threads", "mpi shared memory", "mpi tcp"
  std::string fault;
  std::string stage;
  std::string op;
  int ranks = 2;
  int victim = 1;
};

struct Record {
  std::int64_t at_ms = 0;
  std::string kind;
  std::string message;
};

struct Outcome {
  std::string verdict;  // "ok", or what is wrong
  double seconds = 0;   // from the fault to the last survivor's error
};

std::optional<Record> read(const fs::path& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  Record record;
  std::string line;
  std::getline(file, line);
  record.at_ms = std::stoll(line);
  std::getline(file, record.kind);
  std::stringstream rest;
  rest << file.rdbuf();
  record.message = rest.str();
  return record;
}

/// Processes whose command line has `text`.
std::vector<pid_t> processes_with(const std::string& text) {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "cmdline");
    const std::string line((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (line.find(text) != std::string::npos) found.push_back(static_cast<pid_t>(std::stol(name)));
  }
  return found;
}

class Run {
 public:
  Run(Cell cell, const std::vector<std::string>& program, fs::path folder)
      : cell_(std::move(cell)), folder_(std::move(folder)), begin_(Clock::now()) {
    fs::create_directories(folder_);
    std::vector<std::string> words = command(program);
    pid_ = ::fork();
    if (pid_ == 0) {
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      const std::string log = folder_ / "log";
      if (std::freopen(log.c_str(), "w", stdout) == nullptr) ::_exit(127);
      ::dup2(::fileno(stdout), STDERR_FILENO);
      ::execvp(argv[0], argv.data());
      ::_exit(127);
    }
  }

  [[nodiscard]] const Cell& cell() const { return cell_; }
  [[nodiscard]] const fs::path& folder() const { return folder_; }

  /// Once it has ended, or hangs.
  std::optional<Outcome> poll() {
    int status = 0;
    const bool has_ended = ::waitpid(pid_, &status, WNOHANG) == pid_;
    if (!has_ended && Clock::now() - begin_ < kHungAfter) return std::nullopt;
    Outcome outcome = judge();
    if (!has_ended && outcome.verdict == "ok") outcome.verdict = "the launcher did not end";
    if (const int left = clean_up(); left > 0 && outcome.verdict == "ok" && has_ended) {
      outcome.verdict = fmt::format("{} processes were left", left);
    }
    if (!has_ended) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &status, 0);
    }
    return outcome;
  }

 private:
  [[nodiscard]] bool is_mpi() const { return cell_.communicator != "threads"; }

  std::vector<std::string> command(const std::vector<std::string>& program) const {
    std::vector<std::string> words;
    if (is_mpi()) {
      words.assign(program.begin() + 1, program.end());
      const std::string transport = cell_.communicator == "mpi tcp" ? "self,tcp" : "self,vader";
      for (const char* word : {"--mca", "pml", "ob1", "--mca", "btl"}) words.emplace_back(word);
      words.push_back(transport);
      // Otherwise mpirun kills all others as soon as one is dead, before they can say anything.
      for (const char* word : {"--mca", "orte_enable_recovery", "1", "-n"}) words.emplace_back(word);
      words.push_back(std::to_string(cell_.ranks));
    }
    words.push_back(program.front());
    for (const std::string& word :
         {cell_.fault, cell_.stage, cell_.op, std::to_string(cell_.victim),
          std::to_string(is_mpi() ? 0 : cell_.ranks), std::to_string(kTimeoutMs), folder_.string()}) {
      words.push_back(word);
    }
    return words;
  }

  [[nodiscard]] Outcome judge() const {
    const auto fault = read(folder_ / "fault");
    if (!fault) return {"the fault did not happen", 0};
    Outcome outcome{"ok", 0};
    const bool must_be_right = cell_.fault == "slow";
    for (int rank = 0; rank < cell_.ranks; ++rank) {
      if (rank == cell_.victim && !must_be_right) continue;
      const auto record = read(folder_ / fmt::format("rank{}", rank));
      if (!record) return {fmt::format("rank {} did not say anything", rank), 0};
      if (must_be_right) {
        if (record->kind != "ok") return {fmt::format("rank {}: {}", rank, record->message), 0};
        continue;
      }
      const std::int64_t took_ms = record->at_ms - fault->at_ms;
      outcome.seconds = std::max(outcome.seconds, static_cast<double>(took_ms) / 1e3);
      if (took_ms > kAllowedMs) return {fmt::format("rank {} threw after {} ms", rank, took_ms), 0};
      if (const std::string wrong = wrong_message(*record); !wrong.empty()) {
        return {fmt::format("rank {}: {}: {}", rank, wrong, record->message), 0};
      }
    }
    if (const auto again = read(folder_ / "again"); again && again->kind != "ok") {
      return {"a new context did not work", 0};
    }
    return outcome;
  }

  /// What is wrong with a survivor's error.
  [[nodiscard]] std::string wrong_message(const Record& record) const {
    if (record.kind == "ok") return "no error";
    if (record.kind == "own error") return "not an error of the library";
    const auto names = [&](const std::string& text) {
      return record.message.find(text) != std::string::npos;
    };
    if (!names(fmt::format("rank {}", cell_.victim))) return "does not name the rank that failed";
    // Before the first call nobody has said yet what is to be called.
    if (!names("gemm-" + cell_.op) && cell_.stage != "start") return "does not name the operator";
    if (!names("m=192") && cell_.stage != "start") return "does not name the shape";
    return "";
  }

  /// Ends what is left. Returns how many there were.
  int clean_up() const {
    const std::string mark = folder_.string();
    const Clock::time_point deadline = Clock::now() + 3s;
    std::vector<pid_t> left = processes_with(mark);
    std::erase(left, pid_);
    while (!left.empty() && Clock::now() < deadline) {
      std::this_thread::sleep_for(50ms);
      left = processes_with(mark);
      std::erase(left, pid_);
    }
    for (const pid_t pid : left) ::kill(pid, SIGKILL);
    return static_cast<int>(left.size());
  }

  Cell cell_;
  fs::path folder_;
  Clock::time_point begin_;
  pid_t pid_ = -1;
};

std::vector<Cell> all_cells(bool with_mpi) {
  std::vector<Cell> cells;
  std::vector<std::string> communicators = {"threads"};
  if (with_mpi) communicators.insert(communicators.end(), {"mpi shared memory", "mpi tcp"});
  for (const std::string& communicator : communicators) {
    for (const std::string op : {"all-reduce", "reduce-scatter", "all-to-all"}) {
      const auto add = [&](const std::string& fault, const std::string& stage) {
        Cell cell{communicator, fault, stage, op};
        cell.ranks = 2 + static_cast<int>(cells.size() % 3);
        cell.victim = static_cast<int>(cells.size() / 3) % cell.ranks;
        cells.push_back(cell);
      };
      for (const std::string fault : {"throw", "exit", "kill", "stop", "slow"}) {
        // Threads cannot be killed one by one.
        if (communicator == "threads" && fault == "kill") continue;
        for (const std::string stage : {"start", "planned", "group", "last"}) add(fault, stage);
      }
      for (const std::string stage : {"start", "limit", "planned", "group", "last"})
        add("out-of-memory", stage);
      add("wrong-plan", "plan");
    }
  }
  return cells;
}

void print(const Cell& cell, const Outcome& outcome) {
  fmt::print("{:<18} {:<15} {:<14} {:<8} {} ranks, {} fails   {:>5.1f} s  {}\n", cell.communicator, cell.op,
             cell.fault, cell.stage, cell.ranks, cell.victim, outcome.seconds, outcome.verdict);
  std::fflush(stdout);
}

int run_matrix(const std::vector<std::string>& program) {
  const fs::path root = fs::temp_directory_path() / fmt::format("failure_matrix_{}", ::getpid());
  const std::vector<Cell> cells = all_cells(program.size() > 1);
  constexpr std::size_t kAtATime = 4;
  std::vector<std::unique_ptr<Run>> running;
  std::size_t next = 0;
  int failed = 0;
  const auto begin = Clock::now();
  while (next < cells.size() || !running.empty()) {
    while (next < cells.size() && running.size() < kAtATime) {
      running.push_back(std::make_unique<Run>(cells[next], program, root / fmt::format("run{}", next)));
      ++next;
    }
    std::this_thread::sleep_for(20ms);
    std::erase_if(running, [&](const auto& run) {
      const auto outcome = run->poll();
      if (!outcome) return false;
      print(run->cell(), *outcome);
      if (outcome->verdict == "ok") {
        fs::remove_all(run->folder());
      } else {
        ++failed;
      }
      return true;
    });
  }
  fmt::print("{} runs in {:.0f} s: {} green, {} not\n", cells.size(),
             std::chrono::duration<double>(Clock::now() - begin).count(),
             cells.size() - static_cast<std::size_t>(failed), failed);
  if (failed > 0) fmt::print("what the runs that are not green left is in {}\n", root.string());
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flashoverlap::test

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: failure_matrix FAILING_RANK [MPIEXEC [ARGUMENT…]]\n");
    return 2;
  }
  return flashoverlap::test::run_matrix(std::vector<std::string>(argv + 1, argv + argc));
}
