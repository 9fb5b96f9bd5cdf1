#include "process_ranks.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string_view>
#include <thread>

#include "core/fail.h"
#include "flashoverlap/launcher.h"
#include "flashoverlap/mpi.h"

namespace flashoverlap::cli {
namespace {

/// Only launchers that MPI can be initialised under; a program that torchrun starts is no MPI job.
std::optional<Launch> mpi_launch() {
  auto launch = detect_launch();
  if (!launch || launch->world_size == 1) return std::nullopt;
  const std::string& launcher = launch->launcher;
  const bool is_mpi = launcher == "OpenMPI" || launcher == "Hydra" || launcher == "SLURM";
  return is_mpi ? launch : std::nullopt;
}

constexpr const char* kInstall = "on Debian: apt-get install libopenmpi-dev openmpi-bin, and build again";

/// The launcher of the MPI that this program was built with: another one's would start processes that do not
/// find each other.
std::string launcher_program() {
#ifdef FLASHOVERLAP_MPIEXEC
  if (::access(FLASHOVERLAP_MPIEXEC, X_OK) == 0) return FLASHOVERLAP_MPIEXEC;
#endif
  return "mpirun";
}

/// MPI that does not find the launcher makes every process a job of its own, and says nothing.
void require_whole_job(const Communicator& communicator) {
  const auto launch = mpi_launch();
  if (!launch || launch->world_size == communicator.size()) return;
  core::fail(ErrorKind::kBadArgument,
             "the environment of {} says that this is process {} of {}, but {} finds {}: start it with the "
             "launcher of that MPI ({}), or clear the variables",
             launch->launcher, launch->rank, launch->world_size, mpi_library_name(), communicator.size(),
             launcher_program());
}

std::string path_of_this_program() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error)
    core::fail(ErrorKind::kUnsupported, "--processes: cannot find this program: {}", error.message());
  return path;
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  if (!words.empty()) words.erase(words.begin());
  return words;
}

/// "--processes 4" and "--processes=4" go, everything else stays.
std::vector<std::string> without_processes(const std::vector<std::string>& words) {
  std::vector<std::string> kept;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--processes") {
      ++i;
    } else if (!words[i].starts_with("--processes=")) {
      kept.push_back(words[i]);
    }
  }
  return kept;
}

void prepare_environment(std::int64_t processes) {
  constexpr int kKeepWhatIsSet = 0;
  const auto set = [](const char* name) { ::setenv(name, "1", kKeepWhatIsSet); };
  // More processes than cores are slow, but right.
  if (processes > static_cast<std::int64_t>(std::thread::hardware_concurrency())) {
    set("OMPI_MCA_rmaps_base_oversubscribe");
  }
  // Not orte_enable_recovery, with which the others of a dead rank could report: mpirun then returns 0
  // whatever happens. The user who typed --processes as root wants root, as in a container.
  if (::geteuid() == 0) {
    set("OMPI_ALLOW_RUN_AS_ROOT");
    set("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM");
  }
}

}  // namespace

bool is_job() {
  return mpi_launch().has_value();
}

std::int64_t job_size() {
  const auto launch = mpi_launch();
  return launch ? launch->world_size : 1;
}

bool is_first_rank() {
  try {
    const auto launch = mpi_launch();
    return !launch || launch->rank == 0;
  } catch (const Error&) {
    return true;  // The error is what is to be said.
  }
}

std::shared_ptr<Communicator> job_communicator(std::int64_t ranks) {
  static const std::shared_ptr<Communicator> communicator = [] {
    if (mpi_library_name().empty()) {
      core::fail(ErrorKind::kUnsupported, "started as one of {} processes, but built without MPI; {}",
                 job_size(), kInstall);
    }
    auto made = make_mpi_communicator();
    require_whole_job(*made);
    return made;
  }();
  if (ranks != communicator->size()) {
    core::fail(ErrorKind::kBadArgument, "--ranks: {} was given, but this job has {} processes; leave it out",
               ranks, communicator->size());
  }
  return communicator;
}

std::vector<std::vector<double>> gather(Communicator& communicator, std::span<const double> values) {
  std::string bytes(values.size_bytes(), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  std::vector<std::vector<double>> all;
  for (const std::string& part : communicator.exchange(bytes, {.operation = "gathering the results"})) {
    auto& received = all.emplace_back(part.size() / sizeof(double));
    if (!part.empty()) std::memcpy(received.data(), part.data(), part.size());
  }
  return all;
}

void start_processes(std::int64_t processes) {
  if (mpi_library_name().empty()) {
    core::fail(ErrorKind::kUnsupported, "--processes: this program was built without MPI; {}", kInstall);
  }
  prepare_environment(processes);
  const std::string launcher = launcher_program();
  std::vector<std::string> words = {launcher, "-n", std::to_string(processes), path_of_this_program()};
  for (std::string& word : without_processes(own_arguments())) words.push_back(std::move(word));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  core::fail(ErrorKind::kUnsupported,
             "--processes: cannot start {}: {}; on Debian: apt-get install openmpi-bin", launcher,
             std::strerror(errno));
}

}  // namespace flashoverlap::cli
