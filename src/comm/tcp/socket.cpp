#include "comm/tcp/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "core/fail.h"

namespace flashoverlap::comm::tcp {
namespace {

constexpr std::uint64_t kMagic = 0x466C4F7652647A31;  // "FlOvRdz1": version 1
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 30U;

struct Header {
  std::uint64_t magic;
  std::uint32_t kind;
  std::uint32_t reserved;
  std::uint64_t number;
  std::uint64_t extra;
  std::uint64_t size;
};

/// Milliseconds for poll, rounded up so that it never returns before the deadline.
int left_ms(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
}

/// False: not ready by the deadline.
bool wait_for(int descriptor, short events, Deadline deadline) {
  while (true) {
    pollfd entry{.fd = descriptor, .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, left_ms(deadline));
    if (ready > 0) return true;
    if (ready == 0) return false;
    if (errno != EINTR) core::fail(ErrorKind::kCommunication, "poll: {}", std::strerror(errno));
  }
}

void set_non_blocking(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  (void)::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK);
  (void)::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  const int on = 1;
  (void)::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

/// Connected, or closed.
Socket try_to_connect(const addrinfo& address, Deadline deadline) {
  Socket socket(::socket(address.ai_family, address.ai_socktype, address.ai_protocol));
  if (!socket.is_open()) return {};
  set_non_blocking(socket.descriptor());
  if (::connect(socket.descriptor(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS || !wait_for(socket.descriptor(), POLLOUT, deadline)) return {};
    int error = 0;
    socklen_t size = sizeof error;
    if (::getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) return {};
  }
  return socket;
}

}  // namespace

Socket::~Socket() {
  if (is_open()) ::close(descriptor_);
}

Socket::Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Socket Socket::listen_at(int port) {
  Socket socket(::socket(AF_INET6, SOCK_STREAM, 0));
  const bool is_v6 = socket.is_open();
  if (!is_v6) socket = Socket(::socket(AF_INET, SOCK_STREAM, 0));
  if (!socket.is_open()) core::fail(ErrorKind::kCommunication, "socket: {}", std::strerror(errno));
  set_non_blocking(socket.descriptor());
  const int on = 1;
  const int off = 0;
  (void)::setsockopt(socket.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  int bound = -1;
  if (is_v6) {
    (void)::setsockopt(socket.descriptor(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<std::uint16_t>(port));
    bound = ::bind(socket.descriptor(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  } else {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    bound = ::bind(socket.descriptor(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  }
  if (bound != 0 || ::listen(socket.descriptor(), SOMAXCONN) != 0) {
    core::fail(ErrorKind::kBadArgument, "rendezvous: rank 0 cannot listen at port {}: {}", port,
               std::strerror(errno));
  }
  return socket;
}

int Socket::local_port() const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::optional<Socket> Socket::accept_by(Deadline deadline) const {
  while (wait_for(descriptor_, POLLIN, deadline)) {
    const int descriptor = ::accept(descriptor_, nullptr, nullptr);
    if (descriptor >= 0) {
      set_non_blocking(descriptor);
      return Socket(descriptor);
    }
  }
  return std::nullopt;
}

Socket Socket::connect_by(const std::string& host, int port, Deadline deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    core::fail(ErrorKind::kBadArgument, "rendezvous: the host '{}' has no address: {}", host,
               ::gai_strerror(status));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  constexpr std::chrono::milliseconds kPause{20};
  while (true) {
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
      Socket socket = try_to_connect(*address, deadline);
      if (socket.is_open()) return socket;
    }
    if (Clock::now() + kPause >= deadline) return {};
    std::this_thread::sleep_for(kPause);
  }
}

bool Socket::send_all(const char* data, std::size_t size, Deadline deadline) const {
  while (size > 0) {
    const ssize_t sent = ::send(descriptor_, data, size, MSG_NOSIGNAL);
    if (sent > 0) {
      data += sent;
      size -= static_cast<std::size_t>(sent);
    } else if (sent < 0 && would_block()) {
      if (!wait_for(descriptor_, POLLOUT, deadline)) return false;
    } else {
      core::fail(ErrorKind::kCommunication, "the connection ended: {}", std::strerror(errno));
    }
  }
  return true;
}

bool Socket::receive_all(char* data, std::size_t size, Deadline deadline) const {
  while (size > 0) {
    const ssize_t got = ::recv(descriptor_, data, size, 0);
    if (got > 0) {
      data += got;
      size -= static_cast<std::size_t>(got);
    } else if (got == 0) {
      core::fail(ErrorKind::kCommunication, "the connection was closed");
    } else if (would_block()) {
      if (!wait_for(descriptor_, POLLIN, deadline)) return false;
    } else {
      core::fail(ErrorKind::kCommunication, "the connection ended: {}", std::strerror(errno));
    }
  }
  return true;
}

bool Socket::send(const Frame& frame, Deadline deadline) const {
  const Header header{.magic = kMagic,
                      .kind = static_cast<std::uint32_t>(frame.kind),
                      .reserved = 0,
                      .number = frame.number,
                      .extra = frame.extra,
                      .size = frame.bytes.size()};
  std::string message(reinterpret_cast<const char*>(&header), sizeof header);
  message += frame.bytes;
  return send_all(message.data(), message.size(), deadline);
}

std::optional<Frame> Socket::receive(Deadline deadline) const {
  Header header{};
  if (!receive_all(reinterpret_cast<char*>(&header), sizeof header, deadline)) return std::nullopt;
  const bool is_known = header.kind >= static_cast<std::uint32_t>(FrameKind::kHello) &&
                        header.kind <= static_cast<std::uint32_t>(FrameKind::kAbort);
  if (header.magic != kMagic || !is_known || header.size > kMaxBytes) {
    core::fail(ErrorKind::kCommunication, "what came is no message of this version of the library");
  }
  Frame frame{.kind = static_cast<FrameKind>(header.kind), .number = header.number, .extra = header.extra};
  frame.bytes.resize(header.size);
  if (!receive_all(frame.bytes.data(), frame.bytes.size(), deadline)) return std::nullopt;
  return frame;
}

Address parse_address(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  Address address;
  bool holds = colon != std::string::npos && colon > 0;
  if (holds) {
    address.host = text.substr(0, colon);
    if (address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']') {
      address.host = address.host.substr(1, address.host.size() - 2);
    }
    const char* const begin = text.data() + colon + 1;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, address.port);
    holds = error == std::errc() && stop == end && address.port >= 1 && address.port <= 65535;
  }
  if (!holds) {
    core::fail(ErrorKind::kBadArgument, "rendezvous '{}' must be host:port with a port from 1 to 65535",
               text);
  }
  return address;
}

}  // namespace flashoverlap::comm::tcp
