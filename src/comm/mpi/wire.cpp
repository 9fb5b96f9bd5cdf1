#include "comm/mpi/wire.h"

#include <algorithm>
#include <cstring>

#include "core/fail.h"

namespace flashoverlap::comm::mpi {
namespace {

// Changes with the format: ranks with different versions of this library must not misread each other.
constexpr std::uint32_t kFormat = 0xF10A0001;
constexpr std::size_t kMaxText = 320;
constexpr std::size_t kFixedBytes = 128;

template <typename T>
void put(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void put_counts(std::string& bytes, const std::vector<std::int64_t>& counts) {
  put(bytes, static_cast<std::uint32_t>(counts.size()));
  for (const std::int64_t count : counts) put(bytes, count);
}

void put_text(std::string& bytes, std::string_view text, std::size_t limit) {
  std::size_t length = std::min(text.size(), limit);
  // Not in the middle of a UTF-8 character.
  while (length < text.size() && length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0U) == 0x80U) {
    --length;
  }
  put(bytes, static_cast<std::uint32_t>(length));
  bytes.append(text.substr(0, length));
}

class Reader {
 public:
  Reader(std::string_view bytes, int sender) : bytes_(bytes), sender_(sender) {}

  template <typename T>
  T get() {
    T value{};
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::vector<std::int64_t> get_counts() {
    const auto size = get<std::uint32_t>();
    need(std::size_t{size} * sizeof(std::int64_t));
    std::vector<std::int64_t> counts(size);
    for (std::int64_t& count : counts) count = get<std::int64_t>();
    return counts;
  }
  std::string get_text() { return std::string(take(get<std::uint32_t>())); }

  [[noreturn]] void malformed() const {
    core::fail(ErrorKind::kCommunication,
               "rank {} of the group sent a call that cannot be read: all ranks must use the same version of "
               "this library",
               sender_);
  }

 private:
  void need(std::size_t size) const {
    if (size > bytes_.size()) malformed();
  }
  std::string_view take(std::size_t size) {
    need(size);
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  std::string_view bytes_;
  int sender_;
};

}  // namespace

std::size_t max_header_bytes(int ranks) {
  return kFixedBytes + 2 * sizeof(std::int64_t) * static_cast<std::size_t>(ranks) + 2 * kMaxText +
         kInlinePayload;
}

std::string encode(const Call& call) {
  std::string bytes;
  bytes.reserve(kFixedBytes + call.operation.size());
  put(bytes, kFormat);
  put(bytes, static_cast<std::int32_t>(call.kind));
  put(bytes, static_cast<std::int32_t>(call.dtype));
  put(bytes, static_cast<std::int32_t>(call.peer));
  put(bytes, call.wave_group);
  put(bytes, call.transfer);
  put_counts(bytes, call.send_counts);
  put_counts(bytes, call.receive_counts);
  put_text(bytes, call.group, kMaxText);
  put_text(bytes, call.operation, kMaxText);
  put(bytes, static_cast<std::int64_t>(call.payload.size()));
  const bool is_inline = call.payload.size() <= kInlinePayload;
  put(bytes, static_cast<std::uint32_t>(is_inline ? call.payload.size() : 0));
  if (is_inline) bytes.append(call.payload);
  return bytes;
}

Header decode(std::string_view bytes, int sender) {
  Reader reader(bytes, sender);
  if (reader.get<std::uint32_t>() != kFormat) reader.malformed();
  Header header;
  Call& call = header.call;
  const auto kind = reader.get<std::int32_t>();
  const auto dtype = reader.get<std::int32_t>();
  if (kind < 0 || kind > static_cast<std::int32_t>(CallKind::kSubgroup)) reader.malformed();
  if (dtype < 0 || dtype > static_cast<std::int32_t>(DType::kFloat16)) reader.malformed();
  call.kind = static_cast<CallKind>(kind);
  call.dtype = static_cast<DType>(dtype);
  call.peer = reader.get<std::int32_t>();
  call.wave_group = reader.get<std::int64_t>();
  call.transfer = reader.get<std::int64_t>();
  call.send_counts = reader.get_counts();
  call.receive_counts = reader.get_counts();
  call.group = reader.get_text();
  call.operation = reader.get_text();
  header.payload_size = reader.get<std::int64_t>();
  if (header.payload_size < 0) reader.malformed();
  call.payload = reader.get_text();
  return header;
}

}  // namespace flashoverlap::comm::mpi
