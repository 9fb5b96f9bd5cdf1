// A test runner without dependencies, so that one binary can be copied to a GPU machine.
#pragma once

#include <cstdint>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace flashoverlap::gpu_test {

/// Ends the test that throws it; counted apart from successes and failures, with its reason.
class Skip : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Test {
  std::string name;
  std::function<void()> body;
};

/// Registers a test at program start.
struct Registration {
  Registration(std::string name, std::function<void()> body);
};

/// FLASHOVERLAP_TEST_SEED, or 1.
std::uint64_t seed();

/// How many random cases a test takes of the `usual` number: FLASHOVERLAP_TEST_CASES at most, for runs under
/// tools that make each take a hundred times as long.
int cases(int usual);

/// A failed expectation. Thrown, so that it also ends a rank's thread.
[[noreturn]] void fail(const char* file, int line, const std::string& message);

/// Runs `call`, which must throw a flashoverlap::Error whose message has every one of `parts`.
void expect_error(const char* file, int line, const std::function<void()>& call,
                  std::initializer_list<const char*> parts);

/// Whether `name` contains one of the filter's comma-separated parts (or the filter has none), and nothing of
/// those that begin with '-'.
bool is_wanted(const std::string& name, const std::string& filter);

/// Runs all tests that are wanted. Returns the number of failures.
int run_tests(const std::string& filter);

}  // namespace flashoverlap::gpu_test

#define GPU_TEST(name)                                                                                      \
  static void gpu_test_##name();                                                                            \
  static const ::flashoverlap::gpu_test::Registration gpu_test_registration_##name(#name, gpu_test_##name); \
  static void gpu_test_##name()

#define GPU_EXPECT(condition, message)                                    \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::ostringstream gpu_text;                                        \
      gpu_text << #condition << ": " << message;                          \
      ::flashoverlap::gpu_test::fail(__FILE__, __LINE__, gpu_text.str()); \
    }                                                                     \
  } while (0)

#define GPU_EXPECT_ERROR(call, ...) \
  ::flashoverlap::gpu_test::expect_error(__FILE__, __LINE__, [&] { call; }, {__VA_ARGS__})
