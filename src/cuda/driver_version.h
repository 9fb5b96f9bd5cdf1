// The version of the NVIDIA driver. No CUDA: builds without it say the version, too.
#pragma once

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace flashoverlap::cuda {

/// The first word of `text` (what the driver's file says) that is numbers with dots between them:
/// "580.159.04"; empty when there is none.
inline std::string driver_version_in(std::string_view text) {
  const auto is_digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find_first_of(" \t\n", begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    bool is_version = !word.empty() && is_digit(word.front()) && is_digit(word.back()) &&
                      word.find('.') != std::string_view::npos && word.find("..") == std::string_view::npos;
    for (const char c : word) is_version = is_version && (is_digit(c) || c == '.');
    if (is_version) return std::string(word);
    begin = end + 1;
  }
  return {};
}

/// Of the driver that is loaded; empty where it is not known.
inline std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  return driver_version_in(
      std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>()));
}

}  // namespace flashoverlap::cuda
