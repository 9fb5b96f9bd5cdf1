#include "core/environment.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "core/fail.h"

namespace flashoverlap::core {
namespace {

std::string_view value_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view{} : std::string_view{value};
}

}  // namespace

std::optional<std::int64_t> integer_from_environment(const char* name, std::int64_t low, std::int64_t high) {
  const std::string_view text = value_of(name);
  if (text.empty()) return std::nullopt;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
    fail(ErrorKind::kBadArgument, "environment variable {} is '{}'; accepted: an integer from {} to {}", name,
         text, low, high);
  }
  return value;
}

std::optional<bool> boolean_from_environment(const char* name) {
  const std::string_view text = value_of(name);
  if (text.empty()) return std::nullopt;
  if (text == "1" || text == "true" || text == "on") return true;
  if (text == "0" || text == "false" || text == "off") return false;
  fail(ErrorKind::kBadArgument, "environment variable {} is '{}'; accepted: 1, true, on, 0, false, off", name,
       text);
}

}  // namespace flashoverlap::core
