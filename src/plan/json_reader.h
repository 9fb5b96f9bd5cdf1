#pragma once

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/fail.h"

namespace flashoverlap::plan {

/// One value of a JSON document that knows where it is, so that every Error(kBadArgument) names the field,
/// for example "plan.transfers[2].source.count is missing". The document must outlive the reader.
class JsonReader {
 public:
  JsonReader(std::string path, const nlohmann::json& value) : path_(std::move(path)), value_(&value) {}

  [[nodiscard]] JsonReader field(const char* name) const {
    if (!value_->is_object()) wrong_type("an object");
    const auto it = value_->find(name);
    if (it == value_->end()) core::fail(ErrorKind::kBadArgument, "{}.{} is missing", path_, name);
    return {path_ + "." + name, *it};
  }

  /// Whether there is such a field: for those that may be left out.
  [[nodiscard]] bool has(const char* name) const {
    if (!value_->is_object()) wrong_type("an object");
    return value_->contains(name);
  }

  template <typename Visit>
  void each(const Visit& visit) const {
    if (!value_->is_array()) wrong_type("an array");
    for (std::size_t i = 0; i < value_->size(); ++i)
      visit(JsonReader(fmt::format("{}[{}]", path_, i), (*value_)[i]));
  }

  [[nodiscard]] std::int64_t integer() const {
    if (!value_->is_number_integer()) wrong_type("an integer");
    if (value_->is_number_unsigned() &&
        value_->get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      bad_value(value_->dump(), "a number below 2^63");
    }
    return value_->get<std::int64_t>();
  }
  [[nodiscard]] std::int64_t integer(const char* name) const { return field(name).integer(); }

  [[nodiscard]] std::int32_t integer32(const char* name) const {
    const JsonReader reader = field(name);
    const std::int64_t value = reader.integer();
    if (!std::in_range<std::int32_t>(value))
      reader.bad_value(std::to_string(value), "a number that fits in 32 bits");
    return static_cast<std::int32_t>(value);
  }

  [[nodiscard]] std::vector<std::int64_t> integers() const {
    std::vector<std::int64_t> values;
    each([&](const JsonReader& element) { values.push_back(element.integer()); });
    return values;
  }

  template <std::size_t N>
  [[nodiscard]] std::array<std::int64_t, N> tuple() const {
    if (!value_->is_array() || value_->size() != N)
      wrong_type(fmt::format("an array of {} integers", N).c_str());
    std::array<std::int64_t, N> values{};
    for (std::size_t i = 0; i < N; ++i)
      values[i] = JsonReader(fmt::format("{}[{}]", path_, i), (*value_)[i]).integer();
    return values;
  }

  [[nodiscard]] std::string text() const {
    if (!value_->is_string()) wrong_type("a string");
    return value_->get<std::string>();
  }

  [[nodiscard]] std::uint64_t hex() const {
    const std::string digits = text();
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (error != std::errc{} || end != digits.data() + digits.size())
      bad_value("\"" + digits + "\"", "16 hexadecimal digits");
    return value;
  }

  [[noreturn]] void bad_value(const std::string& value, const std::string& expected) const {
    core::fail(ErrorKind::kBadArgument, "{} is {}; expected {}", path_, value, expected);
  }

  template <typename... Args>
  [[noreturn]] void bad(fmt::format_string<Args...> format, Args&&... args) const {
    core::fail(ErrorKind::kBadArgument, "{}: {}", path_, fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  [[noreturn]] void wrong_type(const char* expected) const {
    core::fail(ErrorKind::kBadArgument, "{} is of type {}; expected {}", path_, value_->type_name(),
               expected);
  }

  std::string path_;
  const nlohmann::json* value_;
};

}  // namespace flashoverlap::plan
