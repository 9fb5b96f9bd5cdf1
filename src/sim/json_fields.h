#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

/// Reads JSON files of ours so that every error names file, field, value and what it must be.
namespace flashoverlap::sim {

/// Parses `text`; Error(kFile) naming `origin` when it is no JSON (cut off, empty, trailing characters).
nlohmann::json parse_json_file(std::string_view text, const std::string& origin);

/// One JSON object and its path in the file. References must outlive it.
class JsonFields {
 public:
  /// Error(kFile) unless `value` is an object that has no fields but `known`.
  JsonFields(const nlohmann::json& value, std::string path, const std::string& origin,
             std::initializer_list<std::string_view> known);

  [[nodiscard]] bool has(const char* field) const { return value_.contains(field); }
  /// In [low, high].
  [[nodiscard]] double number(const char* field, double low, double high) const;
  [[nodiscard]] double number_or(const char* field, double low, double high, double otherwise) const;
  [[nodiscard]] std::int64_t integer(const char* field, std::int64_t low, std::int64_t high) const;
  [[nodiscard]] std::int64_t integer_or(const char* field, std::int64_t low, std::int64_t high,
                                        std::int64_t otherwise) const;
  [[nodiscard]] std::string text(const char* field) const;
  [[nodiscard]] std::string text_or(const char* field, const std::string& otherwise) const;
  [[nodiscard]] bool boolean_or(const char* field, bool otherwise) const;
  /// The value of a field that must be there, of any type.
  [[nodiscard]] const nlohmann::json& any(const char* field) const;
  [[nodiscard]] const nlohmann::json& array(const char* field) const;
  /// Calls function(element, path of the element) for each element of an array; nothing when the field is
  /// missing.
  void for_each(const char* field,
                const std::function<void(const nlohmann::json&, const std::string&)>& function) const;

  [[nodiscard]] std::string path_of(const char* field) const;
  [[nodiscard]] const std::string& origin() const { return origin_; }
  /// Error(kFile): "<origin>: field '<path>' is <value>, <requirement>".
  [[noreturn]] void refuse(const char* field, const std::string& requirement) const;

 private:
  const nlohmann::json& value_;
  std::string path_;
  const std::string& origin_;
};

/// A double as a JSON number without loss; JSON has no infinities and NaNs, which our writers never have.
nlohmann::json number(double value);

}  // namespace flashoverlap::sim
