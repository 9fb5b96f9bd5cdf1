#include "comm/mpi/control.h"

#include <array>
#include <cstring>

#include "comm/mpi/mpi_error.h"

namespace flashoverlap::comm::mpi {
namespace {

constexpr int kTag = 0;

struct Fixed {
  ControlKind kind;
  std::int32_t error_kind;
  std::int64_t number;
};

}  // namespace

void ControlChannel::send(int rank, const ControlMessage& message) {
  const std::lock_guard lock(mutex_);
  Sent& sent = outbox_.emplace_back();
  const Fixed fixed{message.kind, static_cast<std::int32_t>(message.error_kind), message.number};
  sent.bytes.assign(reinterpret_cast<const char*>(&fixed), sizeof(fixed));
  sent.bytes += message.text.substr(0, kMaxControlText);
  if (MPI_Isend(sent.bytes.data(), static_cast<int>(sent.bytes.size()), MPI_BYTE, rank, kTag, communicator_,
                &sent.request) != MPI_SUCCESS) {
    outbox_.pop_back();
  }
}

std::optional<ControlChannel::Received> ControlChannel::receive() {
  int found = 0;
  MPI_Message handle = MPI_MESSAGE_NULL;
  MPI_Status status;
  check(MPI_Improbe(MPI_ANY_SOURCE, kTag, communicator_, &found, &handle, &status), "MPI_Improbe");
  if (found == 0) return std::nullopt;
  std::array<char, sizeof(Fixed) + kMaxControlText> bytes;
  check(MPI_Mrecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, &handle, &status), "MPI_Mrecv");
  int size = 0;
  check(MPI_Get_count(&status, MPI_BYTE, &size), "MPI_Get_count");
  Fixed fixed{};
  std::memcpy(&fixed, bytes.data(), sizeof(fixed));
  return Received{
      status.MPI_SOURCE,
      {fixed.kind, static_cast<ErrorKind>(fixed.error_kind), fixed.number,
       std::string(bytes.data() + sizeof(fixed), static_cast<std::size_t>(size) - sizeof(fixed))}};
}

bool ControlChannel::all_sent() {
  const std::lock_guard lock(mutex_);
  for (auto sent = outbox_.begin(); sent != outbox_.end();) {
    int is_done = 0;
    const bool is_lost = MPI_Test(&sent->request, &is_done, MPI_STATUS_IGNORE) != MPI_SUCCESS;
    sent = is_lost || is_done != 0 ? outbox_.erase(sent) : std::next(sent);
  }
  return outbox_.empty();
}

}  // namespace flashoverlap::comm::mpi
