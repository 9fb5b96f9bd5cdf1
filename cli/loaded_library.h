#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <string>

namespace flashoverlap::cli {

/// A library that is loaded for as long as this lives.
class Library {
 public:
  /// Tries the names in turn.
  explicit Library(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      handle_ = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (handle_ != nullptr) return;
    }
  }
  // Not closed: CUDA's and MPI's libraries do not survive being unloaded everywhere.
  ~Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  explicit operator bool() const { return handle_ != nullptr; }

  template <typename Function>
  Function* function(const char* name) const {
    return handle_ == nullptr ? nullptr : reinterpret_cast<Function*>(::dlsym(handle_, name));
  }
  /// File that `symbol` came from.
  [[nodiscard]] std::string path_of(const char* symbol) const {
    Dl_info info{};
    void* address = handle_ == nullptr ? nullptr : ::dlsym(handle_, symbol);
    return address != nullptr && ::dladdr(address, &info) != 0 ? info.dli_fname : "";
  }

 private:
  void* handle_ = nullptr;
};

}  // namespace flashoverlap::cli
