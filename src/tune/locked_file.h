#pragma once

#include <optional>
#include <string>

/// Files that several processes read and write at once.
namespace flashoverlap::tune {

/// Exclusive lock (flock) on a file made for the purpose, held while this lives; the kernel frees it when the
/// process dies. Makes the folder and the file if need be. Throws Error(kFile).
class FileLock {
 public:
  explicit FileLock(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_ = -1;
};

/// nullopt when the file does not exist; Error(kFile) when it cannot be read.
std::optional<std::string> read_whole_file(const std::string& path);

/// Readers see the old text or the new one, nothing in between. Call with the lock held. Throws Error(kFile).
void replace_file(const std::string& path, const std::string& text);

/// Renames, overwriting. Throws Error(kFile).
void move_aside(const std::string& path, const std::string& to);

}  // namespace flashoverlap::tune
