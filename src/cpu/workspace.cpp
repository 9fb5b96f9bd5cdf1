#include "cpu/workspace.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "core/fail.h"

namespace flashoverlap::cpu {
namespace {

constexpr std::align_val_t kAlignment{4096};

// All ones is NaN in every element type.
constexpr int kNanByte = 0xFF;

std::int64_t physical_bytes() {
  return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

void AlignedBuffer::Free::operator()(std::byte* data) const noexcept {
  ::operator delete(data, kAlignment);
}

void AlignedBuffer::grow(std::int64_t bytes, std::string_view purpose) {
  if (bytes <= size_bytes_) return;
  data_.reset();
  size_bytes_ = 0;
  // Linux promises more memory than there is and kills the process when it is touched: refuse here instead.
  const std::int64_t available = physical_bytes();
  if (bytes < available) {
    data_.reset(
        static_cast<std::byte*>(::operator new(static_cast<std::size_t>(bytes), kAlignment, std::nothrow)));
  }
  if (data_ == nullptr) {
    core::fail(ErrorKind::kOutOfMemory, "{} needs {} bytes of workspace; this machine has {} bytes of memory",
               purpose, bytes, available);
  }
  size_bytes_ = bytes;
}

void AlignedBuffer::fill_with_nan() {
  if (size_bytes_ > 0) std::memset(data_.get(), kNanByte, static_cast<std::size_t>(size_bytes_));
}

Workspace::Need Workspace::held() const {
  return {.packed = packed_.size_bytes(),
          .received = received_.size_bytes(),
          .staged = staged_.size_bytes(),
          .scratch = scratch_.size_bytes(),
          .partial = partial_.size_bytes()};
}

void Workspace::reserve(const Need& need, std::string_view purpose) {
  const Need now = held();
  const Need then{.packed = std::max(now.packed, need.packed),
                  .received = std::max(now.received, need.received),
                  .staged = std::max(now.staged, need.staged),
                  .scratch = std::max(now.scratch, need.scratch),
                  .partial = std::max(now.partial, need.partial)};
  if (limit_bytes_ > 0 && then.total() > limit_bytes_) {
    core::fail(
        ErrorKind::kOutOfMemory,
        "{} needs {} bytes of workspace ({} packed, {} received, {} staged, {} scratch{}; {} with what "
        "other calls "
        "need); workspace_limit_bytes makes {} available",
        purpose, need.total(), need.packed, need.received, need.staged, need.scratch,
        need.partial == 0 ? "" : fmt::format(", {} partial sums", need.partial), then.total(), limit_bytes_);
  }
  packed_.grow(need.packed, purpose);
  received_.grow(need.received, purpose);
  staged_.grow(need.staged, purpose);
  scratch_.grow(need.scratch, purpose);
  partial_.grow(need.partial, purpose);
}

void Workspace::fill_with_nan() {
  for (AlignedBuffer* buffer : {&packed_, &received_, &staged_, &scratch_, &partial_}) {
    buffer->fill_with_nan();
  }
}

}  // namespace flashoverlap::cpu
