#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "flashoverlap/in_process.h"

namespace flashoverlap::test {

using CommunicatorPointer = std::shared_ptr<Communicator>;

/// What a rank threw; no value where it did not.
struct Thrown {
  ErrorKind kind;
  std::string message;
};

/// Runs `function` on a thread per rank, without run_ranks: nobody is aborted on anybody's behalf. Returns
/// what each threw.
inline std::vector<std::optional<Thrown>> thrown_by_ranks(
    int world_size, const InProcessOptions& options,
    const std::function<void(CommunicatorPointer)>& function) {
  const std::vector<CommunicatorPointer> communicators = make_in_process_communicators(world_size, options);
  std::vector<std::optional<Thrown>> thrown(communicators.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < communicators.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        function(communicators[rank]);
      } catch (const Error& error) {
        thrown[rank] = Thrown{error.kind(), error.what()};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

/// What `function` threw.
inline std::optional<Thrown> thrown_by(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    return Thrown{error.kind(), error.what()};
  }
  return std::nullopt;
}

inline void expect_error(const std::optional<Thrown>& thrown, ErrorKind kind,
                         const std::vector<std::string>& parts) {
  ASSERT_TRUE(thrown.has_value()) << "nothing was thrown";
  EXPECT_EQ(name_of(thrown->kind), std::string(name_of(kind))) << thrown->message;
  for (const std::string& part : parts) {
    EXPECT_NE(thrown->message.find(part), std::string::npos)
        << "'" << part << "' is not in: " << thrown->message;
  }
}

/// Every rank threw, and all the same.
inline void expect_same_error(const std::vector<std::optional<Thrown>>& thrown, ErrorKind kind,
                              const std::vector<std::string>& parts) {
  for (const auto& one : thrown) {
    expect_error(one, kind, parts);
    ASSERT_TRUE(one.has_value() && thrown[0].has_value());
    EXPECT_EQ(one->message, thrown[0]->message);
  }
}

}  // namespace flashoverlap::test
