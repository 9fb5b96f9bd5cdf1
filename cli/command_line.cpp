#include "command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "commands.h"
#include "flashoverlap/error.h"
#include "flashoverlap/version.h"
#include "process_ranks.h"

namespace flashoverlap::cli {
namespace {

/// One line on stderr, whatever the message holds: a file name may contain line breaks.
int report(int exit_code, std::string message) {
  // All ranks of a job have the same command line, and agree on what is wrong with it.
  if (exit_code == kExitUsage && !is_first_rank()) return exit_code;
  for (char& c : message) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  fmt::print(stderr, "flashoverlap: {}\n", message);
  return exit_code;
}

int exit_code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadArgument:
    case ErrorKind::kUnsupported:
    case ErrorKind::kOutOfMemory:
    case ErrorKind::kFile:
      return kExitUsage;
    case ErrorKind::kDevice:
    case ErrorKind::kCommunication:
    case ErrorKind::kTimeout:
    case ErrorKind::kInternal:
      return kExitFailure;
  }
  return kExitFailure;
}

std::string list_of(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(sub->get_name());
  return names;
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (option->nonpositional()) names.push_back(option->get_name());
  }
  return names;
}

/// CLI11 takes the value of an option that it does not know for an argument of its own, and then names the
/// wrong culprit. So unknown commands and options are found here. Returns an empty text when there are none.
std::string unknown_word(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* current = &app;
  for (const std::string& word : words) {
    const bool is_option = word.size() > 1 && word[0] == '-' && word != "--" && std::isdigit(word[1]) == 0;
    if (is_option) {
      const std::string name = word[1] == '-' ? word.substr(0, word.find('=')) : word.substr(0, 2);
      if (current->get_option_no_throw(name) == nullptr) {
        return fmt::format("{}: no such option; accepted: {}", name, list_of(option_names(*current)));
      }
    } else {
      const auto named =
          current->get_subcommands([&](const CLI::App* sub) { return sub->get_name() == word; });
      if (named.empty() && current != &app) continue;  // a value or an argument
      if (named.empty()) {
        return fmt::format("'{}' is not a command; accepted: {}", word, list_of(command_names(app)));
      }
      current = named.front();
    }
  }
  return {};
}

/// The same in words that say what is accepted.
std::string text_of(const CLI::ParseError& error) {
  std::string text = error.what();
  const auto replace = [&text](std::string_view from, std::string_view to) {
    if (const std::size_t place = text.find(from); place != std::string::npos)
      text.replace(place, from.size(), to);
  };
  replace(": 1 required ", ": needs a value: ");
  replace(": At Most 1 required but received ", ": expected once, given this often: ");
  replace(" excludes ", ": cannot be given together with ");
  replace("The following argument was not expected: ", "argument not expected: ");
  replace("The following arguments were not expected: ", "arguments not expected: ");
  return text;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("Runs, plans and measures GEMMs whose collective overlaps with them.\n", "flashoverlap");
  app.set_version_flag("--version", fmt::format("flashoverlap {}", kVersion), "Print the version and exit");
  app.get_formatter()->column_width(34);
  app.footer(
      "Exit codes: 0 correct, 1 wrong or unreachable result, 2 bad usage.\n"
      "'flashoverlap COMMAND --help' describes one command.");
  Action action;
  add_run_command(app, action);
  add_plan_command(app, action);
  add_doctor_command(app, action);
  add_profile_command(app, action);
  add_tune_command(app, action);
  add_simulate_command(app, action);

  const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (const std::string unknown = unknown_word(app, words); !unknown.empty())
    return report(kExitUsage, unknown);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    return report(kExitUsage, text_of(error));
  }
  if (action) return action();
  return report(kExitUsage, fmt::format("no command given; accepted: {}; see flashoverlap --help",
                                        list_of(command_names(app))));
}

}  // namespace

int run_command_line(int argc, char** argv) {
  try {
    const int exit_code = parse_and_run(argc, argv);
    if (std::fflush(stdout) != 0) return report(kExitUsage, "cannot write to standard output");
    return exit_code;
  } catch (const Error& error) {
    return report(exit_code_of(error.kind()), error.what());
  } catch (const CLI::ParseError& error) {
    return report(kExitUsage, text_of(error));
  } catch (const std::bad_alloc&) {
    return report(kExitUsage, "out of memory: use smaller --m, --n, --k or fewer --ranks");
  } catch (const std::system_error& error) {
    return report(kExitUsage, fmt::format("the system refused a resource: {}", error.what()));
  } catch (const std::exception& error) {
    return report(kExitFailure, fmt::format("internal error, please report it: {}", error.what()));
  }
}

}  // namespace flashoverlap::cli
