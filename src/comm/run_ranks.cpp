#include <fmt/format.h>

#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/in_process_world.h"
#include "core/fail.h"

namespace flashoverlap {
namespace {

using comm::World;

struct RankError {
  int rank;
  ErrorKind kind;
  std::string message;
};

// The errors of the ranks, in the order in which they were thrown.
class RankErrors {
 public:
  void add(RankError error) {
    const std::lock_guard lock(mutex_);
    errors_.push_back(std::move(error));
  }

  // Throws what went wrong first, once all ranks have ended. The world's failure is what ranks throw that
  // were only waiting; when it began as one rank's own error, that one is told.
  void rethrow_first(const std::optional<World::Failure>& failure) const {
    if (errors_.empty()) return;
    const RankError* first = &errors_.front();
    if (failure && is_of(*first, *failure)) {
      first = own_error_of(failure->culprit, *failure);
      if (first == nullptr) throw Error(failure->kind, failure->message);
    }
    // What ranks tell each other names the rank already.
    if (names_a_rank(first->message)) throw Error(first->kind, first->message);
    throw Error(first->kind, fmt::format("rank {}: {}", first->rank, first->message));
  }

 private:
  /// "rank 2: …" or "rank 2, tile 7 …".
  static bool names_a_rank(const std::string& message) {
    constexpr std::string_view kRank = "rank ";
    if (!message.starts_with(kRank)) return false;
    const std::size_t end = message.find_first_not_of("0123456789", kRank.size());
    return end != std::string::npos && end > kRank.size() && (message[end] == ':' || message[end] == ',');
  }

  static bool is_of(const RankError& error, const World::Failure& failure) {
    return error.message.find(failure.message) != std::string::npos;
  }

  [[nodiscard]] const RankError* own_error_of(int rank, const World::Failure& failure) const {
    for (const RankError& error : errors_) {
      if (error.rank == rank && !is_of(error, failure)) return &error;
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::vector<RankError> errors_;
};

// What the exception in flight says.
RankError current_error(int rank) {
  try {
    throw;
  } catch (const Error& error) {
    return {rank, error.kind(), error.what()};
  } catch (const std::bad_alloc&) {
    return {rank, ErrorKind::kOutOfMemory, "out of memory"};
  } catch (const std::exception& error) {
    return {rank, ErrorKind::kCommunication, error.what()};
  } catch (...) {
    return {rank, ErrorKind::kCommunication, "an exception that is not a std::exception"};
  }
}

}  // namespace

void run_ranks(int world_size, const InProcessOptions& options,
               const std::function<void(std::shared_ptr<Communicator>)>& function) {
  if (!function) core::fail(ErrorKind::kBadArgument, "run_ranks: the function is empty");
  comm::InProcessWorld made = comm::make_in_process_world(world_size, options);
  RankErrors errors;
  const auto run_rank = [&](int rank) {
    try {
      function(std::move(made.communicators[static_cast<std::size_t>(rank)]));
      made.world->finish(rank);
    } catch (...) {
      RankError error = current_error(rank);
      made.world->abort(rank, error.message);
      errors.add(std::move(error));
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(run_rank, rank);
  } catch (const std::exception& error) {
    // The system has no thread left: without this rank the others cannot go on.
    const auto rank = static_cast<int>(threads.size());
    errors.add({rank, ErrorKind::kOutOfMemory, fmt::format("no thread for it: {}", error.what())});
    made.world->abort(rank, fmt::format("no thread for it: {}", error.what()));
  }
  for (std::thread& thread : threads) thread.join();
  errors.rethrow_first(made.world->failure());
}

}  // namespace flashoverlap
