#include "option_values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

namespace flashoverlap::cli {
namespace {

template <typename T>
std::optional<T> parse_whole(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

[[noreturn]] void refuse(const std::string& name, std::string_view text, const std::string& expected) {
  throw CLI::ValidationError(name, fmt::format("'{}' is not accepted; expected {}", text, expected));
}

std::string text_of(IntegerRange range) {
  return fmt::format("an integer from {} to {}", range.min, range.max);
}

std::optional<std::int64_t> integer_in(std::string_view text, IntegerRange range) {
  const auto value = parse_whole<std::int64_t>(text);
  return value && *value >= range.min && *value <= range.max ? value : std::nullopt;
}

/// Calls `read(name, text)` when the option is given.
template <typename Read>
CLI::Option* add_text(CLI::App& app, const std::string& names, const char* type_name,
                      const std::string& description, Read read) {
  const std::string long_name = names.substr(names.find("--"));
  CLI::Option* option = app.add_option_function<std::string>(
      names, [read, long_name](const std::string& text) { read(long_name, text); }, description);
  option->type_name(type_name);
  return option;
}

}  // namespace

std::int64_t parse_integer(const std::string& name, std::string_view text, IntegerRange range) {
  const auto value = integer_in(text, range);
  if (!value) refuse(name, text, text_of(range));
  return *value;
}

double parse_number(const std::string& name, std::string_view text, double min, double max) {
  const auto value = parse_whole<double>(text);
  if (!value || !std::isfinite(*value) || *value < min || *value > max) {
    refuse(name, text, fmt::format("a number from {} to {}", min, max));
  }
  return *value;
}

std::vector<std::int64_t> parse_integer_list(const std::string& name, std::string_view text,
                                             IntegerRange range) {
  std::vector<std::int64_t> values;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const auto value = integer_in(text.substr(begin, end - begin), range);
    if (!value)
      refuse(name, text, fmt::format("integers from {} to {} with commas between", range.min, range.max));
    values.push_back(*value);
    begin = end + 1;
  }
  return values;
}

CLI::Option* add_integer(CLI::App& app, const std::string& names, std::int64_t& value, IntegerRange range,
                         const std::string& description) {
  return add_text(app, names, "INTEGER", description,
                  [&value, range](const std::string& name, const std::string& text) {
                    value = parse_integer(name, text, range);
                  });
}

CLI::Option* add_integer_or_auto(CLI::App& app, const std::string& names, std::int64_t& value,
                                 IntegerRange range, const std::string& description) {
  return add_text(app, names, "auto|INTEGER", description,
                  [&value, range](const std::string& name, const std::string& text) {
                    const auto number = integer_in(text, range);
                    if (!number && text != "auto") refuse(name, text, "auto or " + text_of(range));
                    value = number.value_or(0);
                  });
}

CLI::Option* add_number(CLI::App& app, const std::string& names, double& value, double min, double max,
                        const std::string& description) {
  return add_text(app, names, "NUMBER", description,
                  [&value, min, max](const std::string& name, const std::string& text) {
                    value = parse_number(name, text, min, max);
                  });
}

CLI::Option* add_choice(CLI::App& app, const std::string& names, std::string& value,
                        const std::vector<std::string>& accepted, const std::string& description) {
  const std::string type = fmt::format("{}", fmt::join(accepted, "|"));
  return add_text(app, names, type.c_str(), description,
                  [&value, accepted](const std::string& name, const std::string& text) {
                    require_choice(name, text, accepted);
                    value = text;
                  });
}

CLI::Option* add_seed(CLI::App& app, std::uint64_t& seed) {
  return add_text(app, "--seed", "INTEGER", "Seed of the matrices, the routing and the check's sample",
                  [&seed](const std::string& name, const std::string& text) {
                    const auto value = parse_whole<std::uint64_t>(text);
                    if (!value) {
                      refuse(
                          name, text,
                          fmt::format("an integer from 0 to {}", std::numeric_limits<std::uint64_t>::max()));
                    }
                    seed = *value;
                  });
}

void require_choice(const std::string& name, const std::string& value,
                    const std::vector<std::string>& accepted) {
  if (std::find(accepted.begin(), accepted.end(), value) != accepted.end()) return;
  refuse(name, value, fmt::format("{}", fmt::join(accepted, ", ")));
}

void require_options_behind(const CLI::App& sub) {
  for (const CLI::Option* option : sub.get_parent()->get_options()) {
    if (option->count() == 0) continue;
    throw CLI::ValidationError(option->get_name(),
                               fmt::format("stands before {}; its options belong behind it", sub.get_name()));
  }
}

}  // namespace flashoverlap::cli
