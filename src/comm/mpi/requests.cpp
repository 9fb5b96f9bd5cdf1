#include "comm/mpi/requests.h"

#include <fmt/format.h>

#include <utility>

#include "comm/mpi/backoff.h"
#include "comm/mpi/mpi_error.h"

namespace flashoverlap::comm::mpi {

void Requests::send(const void* data, std::int64_t bytes, int peer, int tag, Then then) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, communicator_, &request);
  add(code, request, {false, peer, std::move(then)});
}

void Requests::receive(void* data, std::int64_t bytes, int peer, int tag, Then then) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, communicator_, &request);
  add(code, request, {true, peer, std::move(then)});
}

// A rank that has just died may show as an error of the very call that starts a message to it.
void Requests::add(int code, MPI_Request request, Message message) {
  if (code != MPI_SUCCESS) return note_error(message, code);
  requests_.push_back(request);
  messages_.push_back(std::move(message));
}

// OpenMPI (4.1.4) looks at the requests before it lets messages progress, so that what came meanwhile is seen
// at the next look only: there is one at once, or a thread that sleeps in between would lose as long again.
bool Requests::advance() {
  return advance_once() || advance_once();
}

bool Requests::advance_once() {
  if (requests_.empty()) return false;
  const auto count = static_cast<int>(requests_.size());
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int completed = 0;
  const int code = MPI_Testsome(count, requests_.data(), &completed, indices_.data(), statuses_.data());
  if (code != MPI_ERR_IN_STATUS) check(code, "MPI_Testsome");
  if (completed == MPI_UNDEFINED || completed == 0) return false;
  std::vector<std::pair<Then, int>> due;
  for (std::size_t i = 0; i < static_cast<std::size_t>(completed); ++i) {
    Message& message = messages_[static_cast<std::size_t>(indices_[i])];
    const MPI_Status& status = statuses_[i];
    if (code == MPI_ERR_IN_STATUS && status.MPI_ERROR != MPI_SUCCESS) {
      note_error(message, status.MPI_ERROR);
      continue;
    }
    int bytes = 0;
    if (message.is_receive) check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    due.emplace_back(std::move(message.then), bytes);
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    if (kept != i) {
      requests_[kept] = requests_[i];
      messages_[kept] = std::move(messages_[i]);
    }
    ++kept;
  }
  requests_.resize(kept);
  messages_.resize(kept);
  for (auto& [then, bytes] : due) then(bytes);
  return true;
}

void Requests::note_error(const Message& message, int code) {
  if (!error_.empty()) return;
  error_ = fmt::format("a message {} rank {} of the group failed: {}", message.is_receive ? "from" : "to",
                       message.peer, error_text(code));
}

void Requests::withdraw(std::chrono::steady_clock::time_point deadline) noexcept {
  try {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (messages_[i].is_receive) MPI_Cancel(&requests_[i]);
      messages_[i].then = [](int) {};
    }
    Backoff backoff;
    while (!empty() && std::chrono::steady_clock::now() < deadline) {
      if (!advance()) backoff.wait();
    }
  } catch (...) {
    // There is an error on its way already that says more.
  }
}

}  // namespace flashoverlap::comm::mpi
