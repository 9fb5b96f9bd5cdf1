#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace flashoverlap::test {

struct ProcessResult {
  int exit_code = -1;  ///< -1: ended by a signal, or by us because it took too long.
  std::string out;
  std::string err;
};

struct ProcessOptions {
  std::map<std::string, std::string> environment = {};  ///< Added to ours.
  std::string stdout_path = {};                         ///< Where standard output goes; empty: into `out`.
  std::chrono::seconds limit{60};
};

namespace detail {

[[noreturn]] inline void become(const std::vector<std::string>& command, const ProcessOptions& options,
                                int out, int err) {
  if (!options.stdout_path.empty()) out = ::open(options.stdout_path.c_str(), O_WRONLY);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  for (const auto& [name, value] : options.environment) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  ::_exit(127);
}

/// Reads both pipes to their ends. False when that takes longer than the limit.
inline bool read_all(std::array<int, 2> pipes, std::array<std::string*, 2> texts,
                     std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::array<pollfd, 2> watched{{{pipes[0], POLLIN, 0}, {pipes[1], POLLIN, 0}}};
  while (watched[0].fd >= 0 || watched[1].fd >= 0) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    constexpr int kPollMs = 1000;
    ::poll(watched.data(), watched.size(), kPollMs);
    for (std::size_t i = 0; i < watched.size(); ++i) {
      if (watched[i].fd < 0 || watched[i].revents == 0) continue;
      std::array<char, 4096> buffer{};
      const ssize_t count = ::read(watched[i].fd, buffer.data(), buffer.size());
      if (count <= 0) {
        watched[i].fd = -1;
      } else {
        texts[i]->append(buffer.data(), static_cast<std::size_t>(count));
      }
    }
  }
  return true;
}

}  // namespace detail

/// Runs a program to its end. One that takes longer than the limit is killed, and the test fails.
inline ProcessResult run_process(const std::vector<std::string>& command,
                                 const ProcessOptions& options = {}) {
  std::array<int, 2> out{};
  std::array<int, 2> err{};
  ProcessResult result;
  if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) {
    ADD_FAILURE() << "no pipe";
    return result;
  }
  const pid_t child = ::fork();
  if (child == 0) detail::become(command, options, out[1], err[1]);
  ::close(out[1]);
  ::close(err[1]);
  const bool ended = detail::read_all({out[0], err[0]}, {&result.out, &result.err}, options.limit);
  if (!ended) {
    ADD_FAILURE() << "still running after " << options.limit.count() << " s";
    ::kill(child, SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(out[0]);
  ::close(err[0]);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  return result;
}

/// Runs the flashoverlap command of this build.
inline ProcessResult run_command(std::vector<std::string> arguments, const ProcessOptions& options = {}) {
  arguments.insert(arguments.begin(), FLASHOVERLAP_COMMAND);
  return run_process(arguments, options);
}

/// The words between blanks.
inline std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    if (end > begin) words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

}  // namespace flashoverlap::test
