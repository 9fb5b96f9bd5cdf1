#include "tune/locked_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/fail.h"

namespace flashoverlap::tune {
namespace {

[[noreturn]] void refuse(const char* what, const std::string& path, int error) {
  core::fail(ErrorKind::kFile, "tuning cache: cannot {} '{}': {}", what, path, std::strerror(error));
}

void make_folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) refuse("make the folder", folder.string(), error.value());
}

/// Closes on the way out.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

FileLock::FileLock(const std::string& path) {
  make_folder_of(path);
  descriptor_ = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  if (descriptor_ < 0) refuse("open", path, errno);
  while (::flock(descriptor_, LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    ::close(descriptor_);
    refuse("lock", path, error);
  }
}

FileLock::~FileLock() {
  ::close(descriptor_);
}

std::optional<std::string> read_whole_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.number() < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    refuse("open", path, errno);
  }
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t count = ::read(file.number(), buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse("read", path, errno);
    if (count == 0) return text;
    text.append(buffer, static_cast<std::size_t>(count));
  }
}

void replace_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  {
    const Descriptor file(::open(temporary.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644));
    if (file.number() < 0) refuse("open", temporary, errno);
    for (std::size_t written = 0; written < text.size();) {
      const ssize_t count = ::write(file.number(), text.data() + written, text.size() - written);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) refuse("write", temporary, errno);
      written += static_cast<std::size_t>(count);
    }
    // Without this a crash of the machine could leave the new name on an empty file.
    if (::fsync(file.number()) != 0) refuse("sync", temporary, errno);
  }
  move_aside(temporary, path);
}

void move_aside(const std::string& path, const std::string& to) {
  if (std::rename(path.c_str(), to.c_str()) != 0) refuse("rename", path, errno);
}

}  // namespace flashoverlap::tune
