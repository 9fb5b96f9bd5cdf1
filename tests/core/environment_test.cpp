#include "core/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "flashoverlap/error.h"

namespace flashoverlap::core {
namespace {

constexpr const char* kName = "FLASHOVERLAP_TEST_VARIABLE";

class EnvironmentTest : public ::testing::Test {
 protected:
  void TearDown() override { ::unsetenv(kName); }
  static void set(const std::string& value) { ::setenv(kName, value.c_str(), 1); }
  static std::string error_of(const std::function<void()>& function) {
    try {
      function();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadArgument);
      return error.what();
    }
    return "";
  }
};

TEST_F(EnvironmentTest, UnsetAndEmptyHaveNoValue) {
  ::unsetenv(kName);
  EXPECT_FALSE(integer_from_environment(kName, 0, 9).has_value());
  EXPECT_FALSE(boolean_from_environment(kName).has_value());
  set("");
  EXPECT_FALSE(integer_from_environment(kName, 0, 9).has_value());
  EXPECT_FALSE(boolean_from_environment(kName).has_value());
}

TEST_F(EnvironmentTest, Booleans) {
  for (const char* value : {"1", "true", "on"}) {
    set(value);
    EXPECT_EQ(boolean_from_environment(kName), true) << value;
  }
  for (const char* value : {"0", "false", "off"}) {
    set(value);
    EXPECT_EQ(boolean_from_environment(kName), false) << value;
  }
  for (const std::string value : {"abc", "2", "TRUE", " 1", "yes", "-1"}) {
    set(value);
    EXPECT_EQ(error_of([] { (void)boolean_from_environment(kName); }),
              "environment variable FLASHOVERLAP_TEST_VARIABLE is '" + value +
                  "'; accepted: 1, true, on, 0, false, off");
  }
}

TEST_F(EnvironmentTest, Integers) {
  set("7");
  EXPECT_EQ(integer_from_environment(kName, 0, 9), 7);
  set("-3");
  EXPECT_EQ(integer_from_environment(kName, -5, 9), -3);
  set("9223372036854775807");
  EXPECT_EQ(integer_from_environment(kName, 0, INT64_MAX), INT64_MAX);
  for (const std::string value :
       {" 4 ", "4 ", " 4", "4abc", "1e3", "-1", "10", "+4", "0x4", "4.0", "99999999999999999999"}) {
    set(value);
    EXPECT_EQ(error_of([] { (void)integer_from_environment(kName, 0, 9); }),
              "environment variable FLASHOVERLAP_TEST_VARIABLE is '" + value +
                  "'; accepted: an integer from 0 to 9");
  }
}

}  // namespace
}  // namespace flashoverlap::core
