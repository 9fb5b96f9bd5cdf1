// How requests and replies are laid out in the bytes of a frame: numbers of 64 bits, texts behind their
// length.
#include <cstring>

#include "comm/tcp/server.h"
#include "core/fail.h"

namespace flashoverlap::comm::tcp {
namespace {

void put(std::string& to, std::uint64_t value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put(std::string& to, const std::string& text) {
  put(to, std::uint64_t{text.size()});
  to += text;
}

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  std::uint64_t number() {
    std::uint64_t value = 0;
    require(sizeof value);
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    const std::uint64_t size = number();
    require(size);
    std::string value = bytes_.substr(at_, size);
    at_ += size;
    return value;
  }
  /// Elements that follow, each of at least one number.
  std::uint64_t count() {
    const std::uint64_t value = number();
    if (value > (bytes_.size() - at_) / sizeof(std::uint64_t)) broken();
    return value;
  }
  void require_end() const {
    if (at_ != bytes_.size()) broken();
  }

 private:
  [[noreturn]] static void broken() {
    core::fail(ErrorKind::kCommunication,
               "a message of the rendezvous is cut off or has more than it should");
  }
  void require(std::uint64_t size) const {
    if (size > bytes_.size() - at_) broken();
  }

  const std::string& bytes_;
  std::size_t at_ = 0;
};

}  // namespace

Frame encode(const Request& request) {
  Frame frame{.kind = FrameKind::kExchange, .number = request.number, .extra = request.instance};
  put(frame.bytes, std::uint64_t{request.ranks.size()});
  for (const std::uint32_t rank : request.ranks) put(frame.bytes, std::uint64_t{rank});
  put(frame.bytes, request.timeout_ms);
  put(frame.bytes, request.label);
  put(frame.bytes, request.bytes);
  return frame;
}

Request decode_request(const Frame& frame) {
  Request request{.ranks = {},
                  .instance = frame.extra,
                  .number = frame.number,
                  .timeout_ms = 0,
                  .label = {},
                  .bytes = {}};
  Reader reader(frame.bytes);
  for (std::uint64_t left = reader.count(); left > 0; --left) {
    request.ranks.push_back(static_cast<std::uint32_t>(reader.number()));
  }
  request.timeout_ms = reader.number();
  request.label = reader.text();
  request.bytes = reader.text();
  reader.require_end();
  return request;
}

Frame encode_reply(std::uint64_t number, const std::vector<std::string>& values) {
  Frame frame{.kind = FrameKind::kExchange, .number = number};
  put(frame.bytes, std::uint64_t{values.size()});
  for (const std::string& value : values) put(frame.bytes, value);
  return frame;
}

std::vector<std::string> decode_reply(const Frame& frame) {
  std::vector<std::string> values;
  Reader reader(frame.bytes);
  for (std::uint64_t left = reader.count(); left > 0; --left) values.push_back(reader.text());
  reader.require_end();
  return values;
}

}  // namespace flashoverlap::comm::tcp
