#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace flashoverlap::comm::tcp {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

/// What travels: a kind, two numbers whose meaning depends on it, and bytes.
enum class FrameKind : std::uint32_t {
  kHello = 1,  ///< number: rank; extra: world size.
  kExchange,   ///< To the server: bytes are an encoded request; back: an encoded reply.
  kAbort,      ///< bytes: the reason. Both ways.
};
struct Frame {
  FrameKind kind = FrameKind::kHello;
  std::uint64_t number = 0;
  std::uint64_t extra = 0;
  std::string bytes = {};
};

/// A connected or listening TCP socket. Every operation ends by its deadline. Errors of the connection are
/// Error(kCommunication).
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  [[nodiscard]] int descriptor() const { return descriptor_; }
  [[nodiscard]] bool is_open() const { return descriptor_ >= 0; }

  /// Error(kBadArgument) where the port cannot be had.
  static Socket listen_at(int port);
  [[nodiscard]] int local_port() const;
  /// Nothing by the deadline: no value.
  std::optional<Socket> accept_by(Deadline deadline) const;
  /// Tries until the deadline. Error(kBadArgument) where the host has no address.
  static Socket connect_by(const std::string& host, int port, Deadline deadline);

  /// False: not by the deadline.
  [[nodiscard]] bool send(const Frame& frame, Deadline deadline) const;
  /// No value: not by the deadline. Throws when the other side closed, or sent what is no frame.
  [[nodiscard]] std::optional<Frame> receive(Deadline deadline) const;

 private:
  bool send_all(const char* data, std::size_t size, Deadline deadline) const;
  bool receive_all(char* data, std::size_t size, Deadline deadline) const;

  int descriptor_ = -1;
};

/// Splits "host:port" ("[v6]:port" too). Error(kBadArgument) naming the text.
struct Address {
  std::string host;
  int port = 0;
};
Address parse_address(const std::string& text);

}  // namespace flashoverlap::comm::tcp
