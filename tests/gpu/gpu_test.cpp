#include "gpu_test.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "flashoverlap/error.h"

namespace flashoverlap::gpu_test {
namespace {

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

}  // namespace

Registration::Registration(std::string name, std::function<void()> body) {
  tests().push_back({std::move(name), std::move(body)});
}

std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* const text = std::getenv("FLASHOVERLAP_TEST_SEED");
    return text == nullptr ? std::uint64_t{1} : std::strtoull(text, nullptr, 10);
  }();
  return value;
}

int cases(int usual) {
  const char* const text = std::getenv("FLASHOVERLAP_TEST_CASES");
  return text == nullptr ? usual : std::clamp(std::atoi(text), 1, usual);
}

void fail(const char* file, int line, const std::string& message) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + message);
}

void expect_error(const char* file, int line, const std::function<void()>& call,
                  std::initializer_list<const char*> parts) {
  std::string message;
  try {
    call();
  } catch (const Error& error) {
    message = error.what();
  }
  if (message.empty()) fail(file, line, "expected an Error, none was thrown");
  for (const char* part : parts) {
    if (message.find(part) == std::string::npos)
      fail(file, line, "the Error says '" + message + "', without '" + part + "'");
  }
}

bool is_wanted(const std::string& name, const std::string& filter) {
  bool any_wanted = false;
  bool is_named = false;
  for (std::size_t begin = 0; begin <= filter.size();) {
    const std::size_t end = std::min(filter.find(',', begin), filter.size());
    const std::string part = filter.substr(begin, end - begin);
    begin = end + 1;
    if (part.starts_with('-')) {
      if (part.size() > 1 && name.find(part.substr(1)) != std::string::npos) return false;
    } else if (!part.empty()) {
      any_wanted = true;
      is_named = is_named || name.find(part) != std::string::npos;
    }
  }
  return is_named || !any_wanted;
}

int run_tests(const std::string& filter) {
  int passed = 0;
  int failed = 0;
  int skipped = 0;
  std::printf("# seed %llu (FLASHOVERLAP_TEST_SEED)\n", static_cast<unsigned long long>(seed()));
  for (const Test& test : tests()) {
    if (!is_wanted(test.name, filter)) continue;
    std::printf("%-56s ", test.name.c_str());
    std::fflush(stdout);
    const auto begin = std::chrono::steady_clock::now();
    const auto took = [&] {
      return static_cast<long long>(
          std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin)
              .count());
    };
    try {
      test.body();
      std::printf("ok      %6lld ms\n", took());
      ++passed;
    } catch (const Skip& skip) {
      std::printf("skipped: %s\n", skip.what());
      ++skipped;
    } catch (const std::exception& error) {
      std::printf("FAILED  %6lld ms\n  %s\n", took(), error.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  std::printf("# %d passed, %d failed, %d skipped of %d\n", passed, failed, skipped,
              passed + failed + skipped);
  return failed;
}

}  // namespace flashoverlap::gpu_test
