#include "ops/agree.h"

#include <algorithm>
#include <charconv>
#include <new>
#include <optional>

#include "core/fail.h"

namespace flashoverlap::ops {
namespace {

// One message per rank: "ok <agreement> <description>\n<payload>" or "error <kind> <text>\n".

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string encode_error(ErrorKind kind, const std::string& text) {
  return fmt::format("error {} {}\n", static_cast<int>(kind), one_line(text));
}

std::string encode_result(const std::function<Ticket()>& work) {
  try {
    const Ticket ticket = work();
    return fmt::format("ok {} {}\n{}", ticket.agreement, one_line(ticket.description), ticket.payload);
  } catch (const Error& error) {
    return encode_error(error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    return encode_error(ErrorKind::kOutOfMemory, "an allocation failed");
  } catch (const std::exception& error) {
    return encode_error(ErrorKind::kInternal, error.what());
  }
}

struct Message {
  bool ok = false;
  std::uint64_t number = 0;
  std::string text;
  std::string payload;
};

std::optional<Message> decode(const std::string& bytes) {
  const std::size_t line_end = bytes.find('\n');
  const std::size_t first = bytes.find(' ');
  if (line_end == std::string::npos || first > line_end) return std::nullopt;
  const std::size_t second = bytes.find(' ', first + 1);
  if (second > line_end) return std::nullopt;
  Message message;
  message.ok = bytes.compare(0, first, "ok") == 0;
  const auto parsed = std::from_chars(bytes.data() + first + 1, bytes.data() + second, message.number);
  if (parsed.ec != std::errc{} || (!message.ok && bytes.compare(0, first, "error") != 0)) return std::nullopt;
  message.text = bytes.substr(second + 1, line_end - second - 1);
  message.payload = bytes.substr(line_end + 1);
  return message;
}

/// Everybody's messages. A rank that fails while others are still in here may not know of this operation: its
/// abort is given this rank and the operation.
std::vector<std::string> exchange(Communicator& communicator, const std::string& operation,
                                  const std::string& mine) {
  try {
    return communicator.exchange(mine, TransferLabel{.operation = operation});
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.find(operation) != std::string::npos) throw;
    throw Error(error.kind(), fmt::format("rank {}, {}: {}", communicator.rank(), operation, text));
  }
}

}  // namespace

std::string with_shape(std::string_view operation, std::int64_t m, std::int64_t n, std::int64_t k) {
  return fmt::format("{} m={} n={} k={}", operation, m, n, k);
}

std::vector<std::string> agree(Communicator& communicator, const std::string& operation,
                               const std::function<Ticket()>& work) {
  const std::string mine = encode_result(work);
  std::vector<Message> messages;
  for (const std::string& bytes : exchange(communicator, operation, mine)) {
    const std::optional<Message> message = decode(bytes);
    if (!message) {
      core::fail(ErrorKind::kCommunication,
                 "rank {} makes another call than {}: its part of the exchange is unreadable",
                 messages.size(), operation);
    }
    messages.push_back(*message);
  }
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    if (messages[rank].ok) continue;
    std::string text = fmt::format("rank {}: {}", rank, messages[rank].text);
    // What the plan builders say does not know whom they build for.
    if (text.find(operation) == std::string::npos) text += fmt::format(" ({})", operation);
    throw Error(static_cast<ErrorKind>(messages[rank].number), text);
  }
  std::vector<std::string> payloads;
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    if (messages[rank].number != messages[0].number) {
      core::fail(ErrorKind::kBadArgument, "ranks disagree: rank 0 has {}, rank {} has {}", messages[0].text,
                 rank, messages[rank].text);
    }
    payloads.push_back(std::move(messages[rank].payload));
  }
  return payloads;
}

}  // namespace flashoverlap::ops
