#include "flashoverlap/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "comm/tcp/server.h"
#include "comm/tcp/socket.h"
#include "core/fail.h"

namespace flashoverlap {
namespace comm::tcp {
namespace {

/// What the communicators of one process share: the connection to the server.
class Client {
 public:
  Client(Socket socket, int rank) : socket_(std::move(socket)), rank_(rank) {}

  std::vector<std::string> exchange(const Request& request) {
    const std::scoped_lock lock(call_mutex_);
    throw_if_failed();
    // The server keeps the time; it is given a little more to say so.
    constexpr std::chrono::seconds kGrace{3};
    const Deadline deadline = Clock::now() + std::chrono::milliseconds(request.timeout_ms) + kGrace;
    try {
      send(encode(request), deadline);
      const std::optional<Frame> reply = socket_.receive(deadline);
      if (!reply) core::fail(ErrorKind::kTimeout, "rank 0 did not answer");
      if (reply->kind == FrameKind::kAbort) throw Error(static_cast<ErrorKind>(reply->number), reply->bytes);
      return decode_reply(*reply);
    } catch (const Error& error) {
      fail(error.kind(), fmt::format("rendezvous: rank {} in '{}': {}", rank_, request.label, error.what()));
      throw_if_failed();
      throw;
    }
  }

  void abort(const std::string& reason) noexcept {
    try {
      if (!fail(ErrorKind::kCommunication, fmt::format("rank {} aborted: {}", rank_, reason))) return;
      send({.kind = FrameKind::kAbort, .bytes = fmt::format("rank {} aborted: {}", rank_, reason)},
           Clock::now() + std::chrono::seconds(1));
    } catch (...) {  // The connection is gone: so the others find out.
    }
  }

  /// Which of the groups of these ranks the next one is.
  std::uint64_t next_instance(const std::vector<std::uint32_t>& ranks) {
    const std::scoped_lock lock(call_mutex_);
    return ++instances_[ranks];
  }

 private:
  void send(const Frame& frame, Deadline deadline) {
    const std::scoped_lock lock(send_mutex_);
    if (!socket_.send(frame, deadline)) core::fail(ErrorKind::kTimeout, "rank 0 takes no messages");
  }

  bool fail(ErrorKind kind, const std::string& reason) {
    const std::scoped_lock lock(failure_mutex_);
    if (!failure_.empty()) return false;
    kind_ = kind;
    failure_ = reason;
    return true;
  }

  void throw_if_failed() {
    const std::scoped_lock lock(failure_mutex_);
    if (!failure_.empty()) throw Error(kind_, failure_);
  }

  Socket socket_;
  const int rank_;
  std::mutex call_mutex_;  ///< One exchange at a time.
  std::mutex send_mutex_;  ///< An abort may come in between.
  std::mutex failure_mutex_;
  ErrorKind kind_ = ErrorKind::kCommunication;
  std::string failure_;
  std::map<std::vector<std::uint32_t>, std::uint64_t> instances_;
};

class RendezvousCommunicator final : public Communicator {
 public:
  RendezvousCommunicator(std::shared_ptr<Client> client, std::vector<std::uint32_t> ranks, int rank,
                         std::uint64_t instance, std::chrono::milliseconds timeout)
      : client_(std::move(client)),
        ranks_(std::move(ranks)),
        rank_(rank),
        instance_(instance),
        timeout_ms_(timeout.count()) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return static_cast<int>(ranks_.size()); }
  [[nodiscard]] std::string_view name() const override { return "rendezvous"; }

  [[nodiscard]] std::unique_ptr<Stream> make_stream(const std::string& /*name*/) override { unsupported(); }
  void all_reduce(const void*, void*, std::int64_t, DType, Stream&, const TransferLabel&) override {
    unsupported();
  }
  void reduce_scatter(const void*, void*, std::span<const std::int64_t>, DType, Stream&,
                      const TransferLabel&) override {
    unsupported();
  }
  void all_gather(const void*, void*, std::span<const std::int64_t>, DType, Stream&,
                  const TransferLabel&) override {
    unsupported();
  }
  void all_to_all(const void*, std::span<const std::int64_t>, void*, std::span<const std::int64_t>, DType,
                  Stream&, const TransferLabel&) override {
    unsupported();
  }
  void send(const void*, std::int64_t, DType, int, Stream&, const TransferLabel&) override { unsupported(); }
  void receive(void*, std::int64_t, DType, int, Stream&, const TransferLabel&) override { unsupported(); }
  void barrier(Stream&, const TransferLabel&) override { unsupported(); }

  std::vector<std::uint64_t> exchange(std::uint64_t value, const TransferLabel& label) override {
    const std::vector<std::string> texts =
        exchange(std::string(reinterpret_cast<const char*>(&value), sizeof value), label);
    std::vector<std::uint64_t> values(texts.size());
    for (std::size_t r = 0; r < texts.size(); ++r) {
      if (texts[r].size() != sizeof value) {
        core::fail(ErrorKind::kCommunication, "rendezvous: rank {} exchanged a text, this rank a number", r);
      }
      std::memcpy(&values[r], texts[r].data(), sizeof value);
    }
    return values;
  }

  std::vector<std::string> exchange(const std::string& bytes, const TransferLabel& label) override {
    return client_->exchange({.ranks = ranks_,
                              .instance = instance_,
                              .number = next_number_++,
                              .timeout_ms = static_cast<std::uint64_t>(timeout_ms_.load()),
                              .label = std::string(label.operation),
                              .bytes = bytes});
  }

  [[nodiscard]] std::shared_ptr<Communicator> subgroup(std::span<const int> ranks) override {
    std::vector<std::uint32_t> world_ranks;
    int own = -1;
    for (const int r : ranks) {
      if (r < 0 || r >= size()) {
        core::fail(ErrorKind::kBadArgument, "subgroup: {} is not a rank in [0, {})", r, size());
      }
      const std::uint32_t world_rank = ranks_[static_cast<std::size_t>(r)];
      if (std::find(world_ranks.begin(), world_ranks.end(), world_rank) != world_ranks.end()) {
        core::fail(ErrorKind::kBadArgument, "subgroup: rank {} is listed twice", r);
      }
      if (r == rank_) own = static_cast<int>(world_ranks.size());
      world_ranks.push_back(world_rank);
    }
    if (own < 0) core::fail(ErrorKind::kBadArgument, "subgroup: rank {} is not listed, but calls", rank_);
    const std::uint64_t instance = client_->next_instance(world_ranks);
    return std::make_shared<RendezvousCommunicator>(client_, std::move(world_ranks), own, instance,
                                                    timeout());
  }

  void abort(const std::string& reason) noexcept override { client_->abort(reason); }
  void set_timeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override {
    return std::chrono::milliseconds(timeout_ms_);
  }

 private:
  [[noreturn]] static void unsupported() {
    core::fail(ErrorKind::kUnsupported,
               "the rendezvous communicator only exchanges; make an NCCL communicator from it");
  }

  std::shared_ptr<Client> client_;
  std::vector<std::uint32_t> ranks_;  ///< Of the whole world, in this group's order.
  int rank_;
  std::uint64_t instance_;
  std::atomic<std::int64_t> timeout_ms_;
  std::uint64_t next_number_ = 0;
};

/// All ranks' connections, rank 0's own too. Strangers are sent away.
std::vector<Socket> gather_clients(const Socket& listener, int world_size,
                                   std::chrono::milliseconds timeout) {
  const Deadline deadline = Clock::now() + timeout;
  std::vector<Socket> clients(static_cast<std::size_t>(world_size));
  int missing = world_size;
  while (missing > 0) {
    std::optional<Socket> client = listener.accept_by(deadline);
    if (!client) {
      std::string ranks;
      for (std::size_t r = 0; r < clients.size(); ++r) {
        if (!clients[r].is_open()) ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", r);
      }
      core::fail(ErrorKind::kTimeout, "rendezvous: rank {} of {} did not connect within {} ms", ranks,
                 world_size, timeout.count());
    }
    std::optional<Frame> hello;
    try {
      constexpr std::chrono::seconds kGreeting{2};
      hello = client->receive(std::min(deadline, Clock::now() + kGreeting));
    } catch (const Error&) {  // A port scanner, say.
      continue;
    }
    if (!hello || hello->kind != FrameKind::kHello) continue;
    const std::uint64_t rank = hello->number;
    const bool fits = hello->extra == static_cast<std::uint64_t>(world_size) && rank < clients.size() &&
                      !clients[rank].is_open();
    if (!fits) {
      const std::string why = fmt::format(
          "rank {} of {} wants to join a world of {}{}", rank, hello->extra, world_size,
          rank < clients.size() && clients[rank].is_open() ? ", where that rank is here already" : "");
      const Frame refusal{.kind = FrameKind::kAbort,
                          .number = static_cast<std::uint64_t>(ErrorKind::kCommunication),
                          .bytes = why};
      (void)client->send(refusal, deadline);
      for (const Socket& other : clients) {
        if (other.is_open()) (void)other.send(refusal, deadline);
      }
      core::fail(ErrorKind::kCommunication, "rendezvous: {}", why);
    }
    clients[rank] = std::move(*client);
    --missing;
  }
  return clients;
}

Socket greet(const Address& address, const Launch& launch, std::chrono::milliseconds timeout) {
  const Deadline deadline = Clock::now() + timeout;
  Socket socket = Socket::connect_by(address.host, address.port, deadline);
  if (!socket.is_open()) {
    core::fail(ErrorKind::kTimeout, "rendezvous: rank {} of {} found nobody at {} within {} ms", launch.rank,
               launch.world_size, launch.rendezvous, timeout.count());
  }
  (void)socket.send({.kind = FrameKind::kHello,
                     .number = static_cast<std::uint64_t>(launch.rank),
                     .extra = static_cast<std::uint64_t>(launch.world_size)},
                    deadline);
  return socket;
}

}  // namespace
}  // namespace comm::tcp

std::shared_ptr<Communicator> make_rendezvous_communicator(const Launch& launch,
                                                           const RendezvousOptions& options) {
  using namespace comm::tcp;
  if (launch.world_size < 1 || launch.rank < 0 || launch.rank >= launch.world_size) {
    core::fail(ErrorKind::kBadArgument, "rendezvous: rank {} of {}", launch.rank, launch.world_size);
  }
  if (launch.rendezvous.empty()) {
    core::fail(
        ErrorKind::kBadArgument,
        "rendezvous: {} does not say where the processes can meet; set FLASHOVERLAP_RENDEZVOUS=host:port",
        launch.launcher.empty() ? "nobody" : launch.launcher);
  }
  const Address address = parse_address(launch.rendezvous);
  std::shared_ptr<Client> client;
  if (launch.rank == 0) {
    const Socket listener = Socket::listen_at(address.port);
    Socket own = greet({"localhost", address.port}, launch, options.timeout);
    std::vector<Socket> clients = gather_clients(listener, launch.world_size, options.timeout);
    // Ends by itself when the last rank has closed its connection, which may be after this rank has.
    std::thread([all = std::move(clients)]() mutable { serve(std::move(all)); }).detach();
    client = std::make_shared<Client>(std::move(own), launch.rank);
  } else {
    client = std::make_shared<Client>(greet(address, launch, options.timeout), launch.rank);
  }
  std::vector<std::uint32_t> ranks(static_cast<std::size_t>(launch.world_size));
  std::iota(ranks.begin(), ranks.end(), 0U);
  auto communicator =
      std::make_shared<RendezvousCommunicator>(client, std::move(ranks), launch.rank, 0, options.timeout);
  // Nobody goes on before everybody is here.
  (void)communicator->exchange(std::uint64_t{0}, {.operation = "rendezvous"});
  return communicator;
}

}  // namespace flashoverlap
