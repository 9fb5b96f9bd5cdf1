// Runs every fault at every stage with every operator on every communicator, and prints what happened as a
// table.
//
//   failure_matrix FAILING_RANK [MPIEXEC [NETWORK_HOSTS_SH]]
//
// A run is green when every surviving rank threw within the time-out plus 5 s, with a message that names the
// rank that failed and the operator, or, for a slow rank, when every result is right; and when no process is
// left. Run once more, alone, at the end are runs that were only late (another program may have had the
// cores), and those in which OpenMPI itself ended a survivor, which it does (4.1.4, TCP) when a message
// starts in the instant in which its receiver dies.
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
  std::string communicator;  // "threads", "mpi shared memory", "mpi tcp", "mpi hosts"
  std::string fault;
  std::string stage;
  std::string op;
  int ranks = 2;
  int victim = 1;
  int hosts = -1;  // Which set of hosts; of "mpi hosts" only.
};

struct Programs {
  std::string failing_rank;
  std::string mpiexec;        // Empty: without MPI.
  std::string network_hosts;  // Empty: without hosts.
};

struct Record {
  std::int64_t at_ms = 0;
  std::string kind;
  std::string message;
};

struct Outcome {
  std::string verdict;      // "ok", or what is wrong
  double seconds = 0;       // from the fault to the last survivor's error
  bool is_excused = false;  // once
};

// Sets of two hosts each, so that runs whose links are cut do not wait for each other.
constexpr int kHostSets = 3;
constexpr int kHosts = 2;

int network_hosts(const Programs& programs, int set, const std::string& words) {
  const std::string command = fmt::format("FO_HOSTS_PREFIX=fom{} FO_HOSTS_SUBNET={} '{}' {}", set,
                                          100 + 2 * set, programs.network_hosts, words);
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

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

/// All that can be read of it. A file of /proc may go while it is read: then its stream, unlike its buffer,
/// does not throw.
std::string contents(const fs::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// Processes whose command line has `text`.
std::vector<pid_t> processes_with(const std::string& text) {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (contents(entry.path() / "cmdline").find(text) != std::string::npos)
      found.push_back(static_cast<pid_t>(std::stol(name)));
  }
  return found;
}

class Run {
 public:
  Run(Cell cell, const Programs& programs, fs::path folder)
      : cell_(std::move(cell)), folder_(std::move(folder)), begin_(Clock::now()) {
    fs::create_directories(folder_);
    if (cell_.hosts >= 0) {
      for (int host = 1; host <= kHosts; ++host)
        network_hosts(programs, cell_.hosts, fmt::format("link {} up", host));
      ::setenv("FO_HOSTS_PREFIX", fmt::format("fom{}", cell_.hosts).c_str(), 1);
      ::setenv("FO_HOSTS_SUBNET", std::to_string(100 + 2 * cell_.hosts).c_str(), 1);
    }
    std::vector<std::string> words = command(programs);
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
    const int left = clean_up();
    if (outcome.verdict == "ok" && (left > 0 || !has_ended)) {
      outcome.verdict =
          fmt::format("{} processes were left{}", left, has_ended ? "" : ", and the launcher did not end");
    }
    if (outcome.verdict != "ok" && openmpi_ended_a_rank()) {
      outcome.verdict += " (OpenMPI itself ended a rank)";
      outcome.is_excused = true;
    }
    if (!has_ended) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &status, 0);
    }
    return outcome;
  }

 private:
  [[nodiscard]] bool is_mpi() const { return cell_.communicator != "threads"; }

  std::vector<std::string> command(const Programs& programs) const {
    std::vector<std::string> words;
    if (cell_.hosts >= 0) {
      words = {programs.network_hosts, "run"};
    } else if (is_mpi()) {
      words = {programs.mpiexec};
      const std::string transport = cell_.communicator == "mpi tcp" ? "self,tcp" : "self,vader";
      for (const char* word : {"--mca", "pml", "ob1", "--mca", "btl"}) words.emplace_back(word);
      words.push_back(transport);
      // Otherwise mpirun kills all others as soon as one is dead, before they can say anything.
      for (const char* word : {"--mca", "orte_enable_recovery", "1", "-n"}) words.emplace_back(word);
      words.push_back(std::to_string(cell_.ranks));
    }
    words.push_back(programs.failing_rank);
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
      // A rank that is cut off lives, and to it the others are lost.
      if (rank == cell_.victim && !must_be_right && cell_.fault != "cut") continue;
      const auto record = read(folder_ / fmt::format("rank{}", rank));
      if (!record) return {fmt::format("rank {} did not say anything", rank), 0};
      if (must_be_right) {
        if (record->kind != "ok") return {fmt::format("rank {}: {}", rank, record->message), 0};
        continue;
      }
      const std::int64_t took_ms = record->at_ms - fault->at_ms;
      outcome.seconds = std::max(outcome.seconds, static_cast<double>(took_ms) / 1e3);
      if (took_ms > kAllowedMs) return {fmt::format("rank {} threw after {} ms", rank, took_ms), 0, true};
      const int failed = rank == cell_.victim ? 1 - rank : cell_.victim;
      if (const std::string wrong = wrong_message(*record, failed); !wrong.empty()) {
        return {fmt::format("rank {}: {}: {}", rank, wrong, record->message), 0};
      }
    }
    if (const auto again = read(folder_ / "again"); again && again->kind != "ok") {
      return {"a new context did not work", 0};
    }
    return outcome;
  }

  [[nodiscard]] bool openmpi_ended_a_rank() const {
    const std::string log = contents(folder_ / "log");
    return log.find("pml_ob1_sendreq.c") != std::string::npos && log.find("FATAL") != std::string::npos;
  }

  /// What is wrong with a survivor's error.
  [[nodiscard]] std::string wrong_message(const Record& record, int failed) const {
    if (record.kind == "ok") return "no error";
    if (record.kind == "own error") return "not an error of the library";
    const auto names = [&](const std::string& text) {
      return record.message.find(text) != std::string::npos;
    };
    if (!names(fmt::format("rank {}", failed))) return "does not name the rank that failed";
    // Before the first call nobody has said yet what is to be called.
    if (cell_.stage == "start") return "";
    // The layer, or one of its two GEMMs.
    const bool is_layer = cell_.op == "moe-layer";
    const std::string operation = is_layer                  ? "moe-"
                                  : cell_.op == "tail-free" ? "gemm-reduce-scatter"
                                                            : cell_.op;
    if (!names(operation)) return "does not name the operator";
    if (is_layer ? !names("hidden=16") && !names("n=16") && !names("n=32") : !names("m=192")) {
      return "does not name the shape";
    }
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

std::vector<Cell> all_cells(const Programs& programs) {
  std::vector<Cell> cells;
  const std::vector<std::string> operators = {"gemm-all-reduce", "gemm-reduce-scatter", "gemm-all-to-all",
                                              "all-gather-gemm", "tail-free",           "moe-layer"};
  const std::vector<std::string> stages = {"start", "planned", "group", "last"};
  std::vector<std::string> communicators = {"threads"};
  if (!programs.mpiexec.empty()) {
    communicators.insert(communicators.end(), {"mpi shared memory", "mpi tcp"});
  }
  for (const std::string& communicator : communicators) {
    for (const std::string& op : operators) {
      const auto add = [&](const std::string& fault, const std::string& stage) {
        Cell cell{communicator, fault, stage, op};
        cell.ranks = 2 + static_cast<int>(cells.size() % 3);
        cell.victim = static_cast<int>(cells.size() / 3) % cell.ranks;
        cells.push_back(cell);
      };
      for (const std::string fault : {"throw", "exit", "kill", "stop", "slow"}) {
        // Threads cannot be killed one by one.
        if (communicator == "threads" && fault == "kill") continue;
        for (const std::string& stage : stages) add(fault, stage);
      }
      for (const std::string stage : {"start", "limit", "planned", "group", "last"}) {
        // A gather goes straight to its place: it needs no memory of ours.
        if (op == "all-gather-gemm" && stage == "limit") continue;
        add("out-of-memory", stage);
      }
      add("wrong-plan", "plan");
    }
  }
  if (programs.network_hosts.empty()) return cells;
  for (std::size_t op = 0; op < operators.size(); ++op) {
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      cells.push_back({"mpi hosts", "cut", stages[stage], operators[op], kHosts,
                       static_cast<int>((op + stage) % kHosts), static_cast<int>(op) % kHostSets});
    }
  }
  return cells;
}

struct Result {
  Cell cell;
  Outcome outcome;
};

void print(const Cell& cell, const Outcome& outcome) {
  fmt::print("{:<18} {:<20} {:<14} {:<8} {} ranks, {} fails   {:>5.1f} s  {}\n", cell.communicator, cell.op,
             cell.fault, cell.stage, cell.ranks, cell.victim, outcome.seconds, outcome.verdict);
  std::fflush(stdout);
}

// As docs/operations.md has it: for each fault and stage the longest time of the operators.
void print_table(const std::vector<Cell>& cells, const std::vector<Result>& results) {
  std::vector<std::string> communicators;
  std::vector<std::pair<std::string, std::string>> rows;
  const auto add_new = [](auto& list, const auto& item) {
    if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
  };
  for (const Cell& cell : cells) {
    add_new(communicators, cell.communicator);
    add_new(rows, std::pair(cell.fault, cell.stage));
  }
  fmt::print("\n| fault | stage |");
  for (const std::string& name : communicators) fmt::print(" {} |", name);
  fmt::print("\n|---|---|");
  for (std::size_t i = 0; i < communicators.size(); ++i) fmt::print("---|");
  for (const auto& [fault, stage] : rows) {
    fmt::print("\n| {} | {} |", fault, stage);
    for (const std::string& name : communicators) {
      std::string text = "-";
      double longest = 0;
      for (const auto& [cell, outcome] : results) {
        if (cell.communicator != name || cell.fault != fault || cell.stage != stage || text == "FAILED")
          continue;
        longest = std::max(longest, outcome.seconds);
        text = outcome.verdict != "ok" ? "FAILED"
               : fault == "slow"       ? "right"
                                       : fmt::format("{:.1f}", longest);
      }
      fmt::print(" {} |", text);
    }
  }
  fmt::print("\n\n");
}

/// Runs cells, some at a time, and keeps what came of them.
class Matrix {
 public:
  Matrix(const Programs& programs, fs::path root) : programs_(programs), root_(std::move(root)) {}

  void run(std::vector<Cell> waiting, std::size_t at_a_time) {
    std::vector<std::unique_ptr<Run>> running;
    while (!waiting.empty() || !running.empty()) {
      for (auto cell = waiting.begin(); cell != waiting.end() && running.size() < at_a_time;) {
        const bool is_taken = std::any_of(running.begin(), running.end(), [&](const auto& other) {
          return cell->hosts >= 0 && other->cell().hosts == cell->hosts;
        });
        if (is_taken) {
          ++cell;
          continue;
        }
        running.push_back(std::make_unique<Run>(*cell, programs_, root_ / fmt::format("run{}", started_++)));
        cell = waiting.erase(cell);
      }
      std::this_thread::sleep_for(20ms);
      std::erase_if(running, [&](const auto& run) {
        const auto outcome = run->poll();
        if (!outcome) return false;
        print(run->cell(), *outcome);
        if (outcome->verdict == "ok") fs::remove_all(run->folder());
        results_.push_back({run->cell(), *outcome});
        return true;
      });
    }
  }

  void run_excused_ones_again() {
    std::vector<Cell> excused;
    std::erase_if(results_, [&](const Result& result) {
      if (result.outcome.is_excused) excused.push_back(result.cell);
      return result.outcome.is_excused;
    });
    if (excused.empty()) return;
    fmt::print("{} runs were late or ended by OpenMPI; once more, one at a time:\n", excused.size());
    std::fflush(stdout);  // or the processes that are forked print it too
    run(excused, 1);
  }

  [[nodiscard]] const std::vector<Result>& results() const { return results_; }

 private:
  const Programs& programs_;
  fs::path root_;
  int started_ = 0;
  std::vector<Result> results_;
};

/// Hosts for as long as this lives, where this machine allows them.
class Hosts {
 public:
  explicit Hosts(Programs& programs) : programs_(programs) {
    if (programs.network_hosts.empty()) return;
    if (network_hosts(programs, 0, "check") != 0) {
      fmt::print("no runs with links that are cut, for the reason above\n");
      programs_.network_hosts.clear();
      return;
    }
    for (int set = 0; set < kHostSets; ++set) network_hosts(programs, set, fmt::format("up {}", kHosts));
  }
  ~Hosts() {
    if (programs_.network_hosts.empty()) return;
    for (int set = 0; set < kHostSets; ++set) network_hosts(programs_, set, "down");
  }
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

 private:
  Programs& programs_;
};

int run_matrix(Programs programs) {
  const Hosts hosts(programs);
  const fs::path root = fs::temp_directory_path() / fmt::format("failure_matrix_{}", ::getpid());
  constexpr std::size_t kAtATime = 4;
  const auto begin = Clock::now();
  Matrix matrix(programs, root);
  const std::vector<Cell> cells = all_cells(programs);
  matrix.run(cells, kAtATime);
  matrix.run_excused_ones_again();
  const auto& results = matrix.results();
  print_table(cells, results);
  const auto failed = std::count_if(results.begin(), results.end(),
                                    [](const Result& result) { return result.outcome.verdict != "ok"; });
  fmt::print("{} runs in {:.0f} s: {} green, {} not\n", results.size(),
             std::chrono::duration<double>(Clock::now() - begin).count(), std::ssize(results) - failed,
             failed);
  for (const auto& [cell, outcome] : results) {
    if (outcome.verdict != "ok") print(cell, outcome);  // again, where the end of a long output shows it
  }
  if (failed > 0) fmt::print("what the runs that are not green left is in {}\n", root.string());
  if (failed == 0) fs::remove_all(root);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flashoverlap::test

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    fmt::print(stderr, "usage: failure_matrix FAILING_RANK [MPIEXEC [NETWORK_HOSTS_SH]]\n");
    return 2;
  }
  flashoverlap::test::Programs programs{argv[1], argc > 2 ? argv[2] : "", argc > 3 ? argv[3] : ""};
  return flashoverlap::test::run_matrix(std::move(programs));
}
