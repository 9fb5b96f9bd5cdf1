#include <fmt/format.h>

#include <cstdio>
#include <new>
#include <system_error>

#include "commands.h"
#include "flashoverlap/error.h"
#include "flashoverlap/version.h"

namespace flashoverlap::cli {
namespace {

/// One line on stderr, whatever the message holds: a file name may contain line breaks.
int report(int exit_code, std::string message) {
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

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    return report(kExitUsage, error.what());
  }
  if (!action)
    return report(kExitUsage, "no command given; accepted: run, plan, doctor; see flashoverlap --help");
  return action();
}

int run_main(int argc, char** argv) {
  try {
    const int exit_code = parse_and_run(argc, argv);
    if (std::fflush(stdout) != 0) return report(kExitUsage, "cannot write to standard output");
    return exit_code;
  } catch (const Error& error) {
    return report(exit_code_of(error.kind()), error.what());
  } catch (const CLI::ParseError& error) {
    return report(kExitUsage, error.what());
  } catch (const std::bad_alloc&) {
    return report(kExitUsage, "out of memory: use smaller --m, --n, --k or fewer --ranks");
  } catch (const std::system_error& error) {
    return report(kExitUsage, fmt::format("the system refused a resource: {}", error.what()));
  } catch (const std::exception& error) {
    return report(kExitFailure, fmt::format("internal error, please report it: {}", error.what()));
  }
}

}  // namespace
}  // namespace flashoverlap::cli

int main(int argc, char** argv) {
  return flashoverlap::cli::run_main(argc, argv);
}
