#include "comm/run_on_all.h"

#include "core/fail.h"

namespace flashoverlap::comm {

void run_on_all(Communicator& control, std::string_view what, const std::function<void()>& step) {
  std::string outcome;  // empty, or the kind as one character and the message
  const auto failed = [&](ErrorKind kind, const char* message) {
    outcome = static_cast<char>('0' + static_cast<int>(kind));
    outcome += message;
  };
  try {
    step();
  } catch (const Error& error) {
    failed(error.kind(), error.what());
  } catch (const std::exception& error) {
    failed(ErrorKind::kInternal, error.what());
  }
  const std::vector<std::string> outcomes = control.exchange(outcome, {.operation = what});
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    if (outcomes[r].empty()) continue;
    core::fail(static_cast<ErrorKind>(outcomes[r].front() - '0'), "{}: rank {} cannot take part: {}", what, r,
               outcomes[r].substr(1));
  }
}

}  // namespace flashoverlap::comm
