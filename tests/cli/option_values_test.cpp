#include "option_values.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace flashoverlap::cli {
namespace {

template <typename Call>
std::string refusal_of(Call call) {
  try {
    call();
  } catch (const CLI::ValidationError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(OptionValues, IntegersAreReadWhole) {
  constexpr IntegerRange kRange{-5, 1'000'000'000'000};
  EXPECT_EQ(parse_integer("--x", "0", kRange), 0);
  EXPECT_EQ(parse_integer("--x", "-5", kRange), -5);
  EXPECT_EQ(parse_integer("--x", "1000000000000", kRange), 1'000'000'000'000);
  for (const char* text : {"", " ", " 4", "4 ", "+4", "4abc", "abc", "1e3", "4.0", "0x10", "-6",
                           "1000000000001", "99999999999999999999", "--4", "4,5", "１"}) {
    EXPECT_EQ(
        refusal_of([&] { parse_integer("--x", text, kRange); }),
        "--x: '" + std::string(text) + "' is not accepted; expected an integer from -5 to 1000000000000");
  }
}

TEST(OptionValues, NumbersAreFiniteAndInRange) {
  EXPECT_EQ(parse_number("--x", "0.25", 0, 10), 0.25);
  EXPECT_EQ(parse_number("--x", "1e1", 0, 10), 10);
  EXPECT_EQ(parse_number("--x", "0", 0, 10), 0);
  for (const char* text :
       {"", " 1", "1 ", "nan", "inf", "-inf", "-0.1", "10.1", "1e400", "1,5", "abc", "0.5x"}) {
    EXPECT_EQ(refusal_of([&] { parse_number("--x", text, 0, 10); }),
              "--x: '" + std::string(text) + "' is not accepted; expected a number from 0 to 10");
  }
}

TEST(OptionValues, ListsHaveIntegersBetweenCommas) {
  constexpr IntegerRange kRange{1, 9};
  EXPECT_EQ(parse_integer_list("--x", "1,2,9", kRange), (std::vector<std::int64_t>{1, 2, 9}));
  EXPECT_EQ(parse_integer_list("--x", "4", kRange), (std::vector<std::int64_t>{4}));
  for (const char* text : {"", ",", "1,", ",1", "1,,2", "1, 2", "1;2", "0", "1,10", "auto"}) {
    EXPECT_EQ(refusal_of([&] { parse_integer_list("--x", text, kRange); }),
              "--x: '" + std::string(text) +
                  "' is not accepted; expected integers from 1 to 9 with commas between");
  }
}

TEST(OptionValues, ChoicesAreListed) {
  require_choice("--x", "b", {"a", "b"});
  EXPECT_EQ(refusal_of([] {
              require_choice("--x", "B", {"a", "b"});
            }),
            "--x: 'B' is not accepted; expected a, b");
}

}  // namespace
}  // namespace flashoverlap::cli
