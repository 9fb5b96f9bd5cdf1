#pragma once

#include <stdexcept>
#include <string>

namespace flashoverlap {

/// What the caller can do about an `Error`.
enum class ErrorKind {
  kBadArgument,    ///< The call is wrong: correct the shape, type, option or file that the message names.
  kUnsupported,    ///< The call is right but this build or machine cannot carry it out.
  kOutOfMemory,    ///< Less memory is available than the call needs; the message gives both in bytes.
  kFile,           ///< A file cannot be read, written or understood.
  kDevice,         ///< A CUDA or driver call failed.
  kCommunication,  ///< A rank failed, or the ranks' calls do not match; make a new communicator to go on.
  kTimeout,        ///< A rank did not arrive in time; make a new communicator to go on.
  kInternal,       ///< An invariant of this library broke: a defect, please report it.
};

/// Name of `kind` as the messages and the JSON output use it, for example "bad argument".
const char* name_of(ErrorKind kind);

/// The one exception type of this library. The message says what was wrong, what was expected, and where.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

/// The answer to a question such as "does this plan hold?": yes, or no with the reason.
struct [[nodiscard]] Verdict {
  std::string
      reason;  ///< Empty when the answer is yes; otherwise one line that names the requirement that failed.
  explicit operator bool() const noexcept { return reason.empty(); }
};

}  // namespace flashoverlap
