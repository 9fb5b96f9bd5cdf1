#pragma once

#include <functional>
#include <iosfwd>
#include <string>

/// Files named on the command line: refused before any work when they cannot be used.
namespace flashoverlap::cli {

/// Throws Error(kFile), naming `option`, when `path` cannot be written. Leaves no new file and changes none.
void require_writable(const std::string& option, const std::string& path);

/// Replaces the file by what `write` puts into the stream. Throws Error(kFile), naming `option`.
void write_file(const std::string& option, const std::string& path,
                const std::function<void(std::ostream&)>& write);

/// The whole file. Throws Error(kFile), naming `option`.
std::string read_file(const std::string& option, const std::string& path);

}  // namespace flashoverlap::cli
