#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

/// How subcommands print: times and sizes with units, two-column tables, one JSON object.
namespace flashoverlap::cli {

/// "12.3 us", "4.56 ms", "7.89 s".
std::string text_of_us(double us);
/// "512 B", "16.8 MB" (1e6 bytes), …
std::string text_of_bytes(double bytes);
/// "1,2,2"; "none" for an empty list.
std::string text_of_list(const std::vector<std::int64_t>& values);

/// Rows of a name and its value, aligned. An empty name gives an empty line.
std::string to_table(const std::vector<std::pair<std::string, std::string>>& rows);

/// Prints one JSON object and nothing else on stdout. Numbers that are not finite become null.
void print_json(const nlohmann::ordered_json& object);

}  // namespace flashoverlap::cli
