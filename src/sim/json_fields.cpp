#include "sim/json_fields.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/fail.h"

namespace flashoverlap::sim {
namespace {

/// A value as an error message shows it: short, and always valid UTF-8.
std::string shown(const nlohmann::json& value) {
  constexpr std::size_t kLongest = 60;
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

}  // namespace

nlohmann::json parse_json_file(std::string_view text, const std::string& origin) {
  if (text.empty()) core::fail(ErrorKind::kFile, "{}: the file is empty, JSON is expected", origin);
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    core::fail(ErrorKind::kFile, "{}: not valid JSON, or cut off: {}", origin, error.what());
  }
}

JsonFields::JsonFields(const nlohmann::json& value, std::string path, const std::string& origin,
                       std::initializer_list<std::string_view> known)
    : value_(value), path_(std::move(path)), origin_(origin) {
  if (!value.is_object()) {
    core::fail(ErrorKind::kFile, "{}: {} is {}, must be an object", origin,
               path_.empty() ? "the top level" : fmt::format("field '{}'", path_), shown(value));
  }
  for (const auto& item : value.items()) {
    if (std::find(known.begin(), known.end(), item.key()) != known.end()) continue;
    std::string names;
    for (const std::string_view name : known) names += (names.empty() ? "" : ", ") + std::string(name);
    core::fail(ErrorKind::kFile, "{}: unknown field {} (known here: {})", origin,
               shown(path_.empty() ? item.key() : path_ + "." + item.key()), names);
  }
}

std::string JsonFields::path_of(const char* field) const {
  return path_.empty() ? field : path_ + "." + field;
}

void JsonFields::refuse(const char* field, const std::string& requirement) const {
  core::fail(ErrorKind::kFile, "{}: field '{}' is {}, {}", origin_, path_of(field), shown(any(field)),
             requirement);
}

const nlohmann::json& JsonFields::any(const char* field) const {
  const auto found = value_.find(field);
  if (found == value_.end())
    core::fail(ErrorKind::kFile, "{}: field '{}' is missing", origin_, path_of(field));
  return *found;
}

double JsonFields::number(const char* field, double low, double high) const {
  const nlohmann::json& value = any(field);
  const std::string requirement = fmt::format("must be a number in [{}, {}]", low, high);
  if (!value.is_number()) refuse(field, requirement);
  const double result = value.get<double>();
  if (!(result >= low && result <= high)) refuse(field, requirement);
  return result;
}

double JsonFields::number_or(const char* field, double low, double high, double otherwise) const {
  return has(field) ? number(field, low, high) : otherwise;
}

std::int64_t JsonFields::integer(const char* field, std::int64_t low, std::int64_t high) const {
  const nlohmann::json& value = any(field);
  const std::string requirement = fmt::format("must be an integer in [{}, {}]", low, high);
  const bool fits =
      value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() <= INT64_MAX);
  if (!fits) refuse(field, requirement);
  const auto result = value.get<std::int64_t>();
  if (result < low || result > high) refuse(field, requirement);
  return result;
}

std::int64_t JsonFields::integer_or(const char* field, std::int64_t low, std::int64_t high,
                                    std::int64_t otherwise) const {
  return has(field) ? integer(field, low, high) : otherwise;
}

std::string JsonFields::text(const char* field) const {
  if (!any(field).is_string()) refuse(field, "must be a string");
  return any(field).get<std::string>();
}

std::string JsonFields::text_or(const char* field, const std::string& otherwise) const {
  return has(field) ? text(field) : otherwise;
}

bool JsonFields::boolean_or(const char* field, bool otherwise) const {
  if (!has(field)) return otherwise;
  if (!any(field).is_boolean()) refuse(field, "must be true or false");
  return any(field).get<bool>();
}

const nlohmann::json& JsonFields::array(const char* field) const {
  if (!any(field).is_array()) refuse(field, "must be an array");
  return any(field);
}

void JsonFields::for_each(
    const char* field, const std::function<void(const nlohmann::json&, const std::string&)>& function) const {
  if (!has(field)) return;
  std::size_t index = 0;
  for (const nlohmann::json& element : array(field)) {
    function(element, fmt::format("{}[{}]", path_of(field), index));
    ++index;
  }
}

nlohmann::json number(double value) {
  // Whole numbers as integers: "bytes": 1048576 reads better than 1048576.0.
  constexpr double kExact = 9007199254740992.0;
  if (value == std::floor(value) && std::abs(value) <= kExact) return static_cast<std::int64_t>(value);
  return value;
}

}  // namespace flashoverlap::sim
