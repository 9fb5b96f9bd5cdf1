#pragma once

#include <gtest/gtest.h>

#include <string>

#include "flashoverlap/error.h"

namespace flashoverlap::test {

/// The message of the Error(kind) that `call` throws; a failure when it throws nothing or another kind.
template <typename Call>
std::string message_of(ErrorKind kind, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

}  // namespace flashoverlap::test

/// `call` throws Error(kind) with `part` in its message.
#define FLASHOVERLAP_EXPECT_THROW(kind, part, call)                                                 \
  do {                                                                                              \
    const std::string flashoverlap_message = ::flashoverlap::test::message_of(kind, [&] { call; }); \
    EXPECT_NE(flashoverlap_message.find(part), std::string::npos) << flashoverlap_message;          \
  } while (false)
