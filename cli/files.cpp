#include "files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/fail.h"

namespace flashoverlap::cli {
namespace {

[[noreturn]] void refuse(const std::string& option, const char* what, const std::string& path, int error) {
  core::fail(ErrorKind::kFile, "{}: cannot {} '{}': {}", option, what, path, std::strerror(error));
}

}  // namespace

void require_writable(const std::string& option, const std::string& path) {
  std::error_code ignored;
  const bool is_new = !std::filesystem::exists(path, ignored);
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (file < 0) refuse(option, "write", path, errno);
  ::close(file);
  if (is_new) ::unlink(path.c_str());
}

void write_file(const std::string& option, const std::string& path,
                const std::function<void(std::ostream&)>& write) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (file) write(file);
  file.close();
  if (!file) refuse(option, "write", path, errno == 0 ? EIO : errno);
}

std::string read_file(const std::string& option, const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) refuse(option, "read", path, EISDIR);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(option, "read", path, errno);
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) refuse(option, "read", path, EIO);
  return text.str();
}

}  // namespace flashoverlap::cli
