#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// How option values are read: strictly, and with one kind of message, "--name: 'value' is not …; expected
/// …".
namespace flashoverlap::cli {

/// Inclusive.
struct IntegerRange {
  std::int64_t min = 0;
  std::int64_t max = 0;
};

/// Reads the whole text as an integer: no blanks, no sign but '-', nothing behind it. Throws
/// CLI::ValidationError for the option `name`.
std::int64_t parse_integer(const std::string& name, std::string_view text, IntegerRange range);
/// The same for a finite decimal number from `min` to `max`.
double parse_number(const std::string& name, std::string_view text, double min, double max);
/// Integers with commas between them, at least one.
std::vector<std::int64_t> parse_integer_list(const std::string& name, std::string_view text,
                                             IntegerRange range);

/// These add an option to `app`; `names` as CLI11 takes them ("-m,--m"). The variables must outlive parsing
/// and keep their value when the option is not given.
CLI::Option* add_integer(CLI::App& app, const std::string& names, std::int64_t& value, IntegerRange range,
                         const std::string& description);
/// As `add_integer`, and "auto" gives 0.
CLI::Option* add_integer_or_auto(CLI::App& app, const std::string& names, std::int64_t& value,
                                 IntegerRange range, const std::string& description);
CLI::Option* add_number(CLI::App& app, const std::string& names, double& value, double min, double max,
                        const std::string& description);
/// One of `accepted`, exactly as spelt.
CLI::Option* add_choice(CLI::App& app, const std::string& names, std::string& value,
                        const std::vector<std::string>& accepted, const std::string& description);
CLI::Option* add_seed(CLI::App& app, std::uint64_t& seed);

/// Throws CLI::ValidationError when `value` is not in `accepted`, and lists what is.
void require_choice(const std::string& name, const std::string& value,
                    const std::vector<std::string>& accepted);
/// Throws CLI::ValidationError for options that were given to the command before the word of its subcommand:
/// an error, not ignored.
void require_options_behind(const CLI::App& sub);

}  // namespace flashoverlap::cli
