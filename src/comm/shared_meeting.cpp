#include "comm/shared_meeting.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>
#include <system_error>

#include "comm/meeting_pause.h"
#include "comm/run_on_all.h"
#include "core/fail.h"
#include "core/host_name.h"

namespace flashoverlap::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr TransferLabel kLabel{.operation = "shared memory of one host"};
constexpr std::int64_t kLine = 64;  // so that no two ranks write to the same line of a cache
constexpr std::chrono::milliseconds kLookPeriod{20};
constexpr std::chrono::seconds kWritingLimit{1};

constexpr std::int64_t round_up(std::int64_t bytes) {
  return (bytes + kLine - 1) / kLine * kLine;
}

std::string error_text(int error) {
  return std::error_code(error, std::generic_category()).message();
}

/// The same for all processes of one running system, and no others.
std::string host_mark() {
  std::string mark;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), mark);
  return mark.empty() ? core::host_name() : mark;
}

std::string fresh_name() {
  std::random_device device;
  return fmt::format("/flashoverlap-{}-{:08x}{:08x}", getpid(), device(), device());
}

// A lock on byte r of the file, held by an open file and so until its process ends.
struct flock lock_of(int r) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = r;
  lock.l_len = 1;
  return lock;
}

/// Takes the name off shared memory.
class NameGuard {
 public:
  explicit NameGuard(std::string name) : name_(std::move(name)) {}
  ~NameGuard() {
    if (!name_.empty()) (void)shm_unlink(name_.c_str());
  }
  NameGuard(const NameGuard&) = delete;
  NameGuard& operator=(const NameGuard&) = delete;

 private:
  std::string name_;
};

}  // namespace

void require_one_host(const std::vector<std::string>& marks) {
  for (std::size_t r = 1; r < marks.size(); ++r) {
    if (marks[r] == marks[0]) continue;
    core::fail(ErrorKind::kUnsupported,
               "ranks 0 and {} are on different hosts; shared memory needs all ranks on one", r);
  }
}

struct SharedMeeting::Board {
  static constexpr std::uint32_t kNone = 0, kBeingWritten = 1, kSet = 2;
  std::atomic<std::uint32_t> status;
  ErrorKind kind;
  std::array<char, 1000> reason;
};

struct SharedMeeting::State {
  std::atomic<std::uint64_t> arrivals;  ///< Release; read with acquire.
  std::atomic<std::uint32_t> has_closed;
  std::int32_t process;
};

SharedMeeting::SharedMeeting(Communicator& control, std::int64_t slot_bytes,
                             std::chrono::milliseconds timeout)
    : rank_(control.rank()),
      size_(control.size()),
      slot_bytes_(round_up(slot_bytes)),
      timeout_ms_(timeout.count()) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "or processes could not share it");
  try {
    require_one_host(control.exchange(host_mark(), kLabel));
    const std::string name = control.exchange(rank_ == 0 ? fresh_name() : "", kLabel).front();
    const NameGuard guard(rank_ == 0 ? name : "");  // goes when all have the file, or something fails
    for (const bool is_new : {true, false}) {
      run_on_all(control, kLabel.operation, [&] {
        if ((rank_ == 0) == is_new) open(name, is_new);
      });
    }
  } catch (...) {
    close();
    throw;
  }
}

SharedMeeting::~SharedMeeting() {
  close();
}

void SharedMeeting::close() noexcept {
  if (memory_ != nullptr) {
    state(rank_).has_closed.store(1, std::memory_order_release);
    (void)munmap(memory_, bytes());
  }
  memory_ = nullptr;
  if (file_ >= 0) (void)::close(file_);
  file_ = -1;
}

void SharedMeeting::open(const std::string& name, bool is_new) {
  file_ = shm_open(name.c_str(), is_new ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, S_IRUSR | S_IWUSR);
  if (file_ < 0) {
    core::fail(ErrorKind::kUnsupported, "shared memory {} cannot be {}: {}", name,
               is_new ? "made" : "opened (each container of a host has its own)", error_text(errno));
  }
  const auto size = static_cast<off_t>(bytes());
  // Not ftruncate, which promises memory that may not be there when it is written.
  if (const int error = is_new ? posix_fallocate(file_, 0, size) : 0; error != 0) {
    core::fail(ErrorKind::kOutOfMemory, "{} bytes of shared memory: {}", size, error_text(error));
  }
  void* const memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED)
    core::fail(ErrorKind::kOutOfMemory, "{} bytes of shared memory: {}", size, error_text(errno));
  memory_ = memory;
  struct flock lock = lock_of(rank_);
  if (fcntl(file_, F_OFD_SETLK, &lock) != 0)
    core::fail(ErrorKind::kUnsupported, "shared memory cannot be locked: {}", error_text(errno));
  state(rank_).process = getpid();
}

// The memory is zero at first, which is what all of it means to be.

std::size_t SharedMeeting::bytes() const {
  return static_cast<std::size_t>(round_up(sizeof(Board)) + size_ * (round_up(sizeof(State)) + slot_bytes_));
}

SharedMeeting::Board& SharedMeeting::board() const {
  return *static_cast<Board*>(memory_);
}

SharedMeeting::State& SharedMeeting::state(int r) const {
  auto* const states = static_cast<std::byte*>(memory_) + round_up(sizeof(Board));
  return *reinterpret_cast<State*>(states + r * round_up(sizeof(State)));
}

std::byte* SharedMeeting::slot(int r) const {
  auto* const states = static_cast<std::byte*>(memory_) + round_up(sizeof(Board));
  return states + size_ * round_up(sizeof(State)) + r * slot_bytes_;
}

void SharedMeeting::fail(ErrorKind kind, std::string_view reason) noexcept {
  std::uint32_t expected = Board::kNone;
  if (!board().status.compare_exchange_strong(expected, Board::kBeingWritten)) return;
  board().kind = kind;
  reason = reason.substr(0, board().reason.size() - 1);
  std::copy(reason.begin(), reason.end(), board().reason.begin());
  board().reason[reason.size()] = '\0';
  board().status.store(Board::kSet, std::memory_order_release);
}

void SharedMeeting::throw_if_failed() {
  if (board().status.load(std::memory_order_acquire) == Board::kSet)
    throw Error(board().kind, board().reason.data());
  const std::int64_t now = Clock::now().time_since_epoch().count();
  if (now < next_look_ns_) return;
  next_look_ns_ = now + std::chrono::nanoseconds(kLookPeriod).count();
  for (int r = 0; r < size_; ++r) {
    if (is_gone(r)) {
      give_up(ErrorKind::kCommunication,
              fmt::format("rank {} (process {}) ended without a word", r, state(r).process));
    }
  }
}

bool SharedMeeting::is_gone(int r) const {
  if (r == rank_ || state(r).has_closed.load(std::memory_order_acquire) != 0) return false;
  struct flock lock = lock_of(r);
  return fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK &&
         state(r).has_closed.load(std::memory_order_acquire) == 0;
}

void SharedMeeting::give_up(ErrorKind kind, const std::string& reason) {
  fail(kind, reason);
  // Another rank may have been first, and may still be writing: what it writes is the reason of all. It may
  // also die in the middle of it.
  const auto begin = Clock::now();
  while (Clock::now() - begin < kWritingLimit) {
    if (board().status.load(std::memory_order_acquire) == Board::kSet)
      throw Error(board().kind, board().reason.data());
    pause_in_meeting(Clock::now() - begin);
  }
  throw Error(kind, reason);
}

std::string SharedMeeting::missing() const {
  std::string text;
  for (int r = 0; r < size_; ++r) {
    if (state(r).arrivals.load(std::memory_order_acquire) < meetings_)
      text += fmt::format("{}{}", text.empty() ? "" : ", ", r);
  }
  return text;
}

void SharedMeeting::meet(const std::function<std::string()>& what) {
  throw_if_failed();
  ++meetings_;
  state(rank_).arrivals.store(meetings_, std::memory_order_release);
  const auto begin = Clock::now();
  int next = 0;  // all before have come
  while (true) {
    while (next < size_ && state(next).arrivals.load(std::memory_order_acquire) >= meetings_) ++next;
    if (next == size_) return;
    if (state(next).has_closed.load(std::memory_order_acquire) != 0) {
      give_up(ErrorKind::kCommunication,
              fmt::format("{} on rank {} of {}: rank {} has ended its part", what(), rank_, size_, next));
    }
    throw_if_failed();
    const auto waited = Clock::now() - begin;
    if (waited > timeout()) {
      give_up(ErrorKind::kTimeout, fmt::format("{} on rank {} of {}: rank {} did not come within {} ms",
                                               what(), rank_, size_, missing(), timeout().count()));
    }
    pause_in_meeting(waited);
  }
}

}  // namespace flashoverlap::comm
