// Any bytes: as a message, as a peer's description, as NIXL metadata. What parses must come out of
// the encoder as it went in.
#include <algorithm>

#include "arbitrary.h"
#include "message.h"
#include "nixl_metadata.h"
#include "peer_info.h"
#include "peering.h"

namespace kvpush::fuzz {
namespace {

void check_peer_info(BytesView bytes) {
  const Result<PeerInfo> info = decode_peer_info(bytes);
  if (!info.is_ok()) {
    return;
  }
  const Result<PeerInfo> again = decode_peer_info(encode_peer_info(info.value()));
  KVPUSH_CHECK(again.is_ok() && again.value() == info.value(), "a description survives its coding");
}

void check_metadata(BytesView bytes) {
  const Result<NixlMetadata> metadata = unwrap_nixl_metadata(bytes);
  if (metadata.is_ok()) {
    const Bytes again = wrap_nixl_metadata(metadata.value());
    KVPUSH_CHECK(std::ranges::equal(again, bytes), "metadata survives its coding");
  }
}

void check_message(BytesView bytes) {
  const Result<Message> message = parse_message(bytes);
  if (!message.is_ok()) {
    return;
  }
  const Result<Message> again = parse_message(encode_message(message.value()));
  KVPUSH_CHECK(again.is_ok() && again.value() == message.value(), "a message survives its coding");
  if (const auto* hello = std::get_if<HelloMessage>(&message.value().body)) {
    check_peer_info(hello->peer_info);
  }
}

// A good message with a few bytes changed: deeper than noise gets.
void check_damaged(Input& in) {
  Message message{in.u64() | 1U, arbitrary_body(in, 9)};
  message.meeting = in.byte();
  message.stamp = in.u64();
  message.echo = in.u64();
  if (in.below(4) == 0) {
    HelloMessage hello;
    hello.to = 9;
    hello.pairs = {{in.below(4), in.below(4), in.below(4), in.below(4)}};
    const BytesView info = in.bytes(64);
    hello.peer_info.assign(info.begin(), info.end());
    message.body = std::move(hello);
  }
  Bytes bytes = encode_message(message);
  for (std::uint32_t changes = in.below(4); changes != 0; --changes) {
    bytes[(in.byte() * std::size_t{256} + in.byte()) % bytes.size()] = std::byte{in.byte()};
  }
  bytes.resize(bytes.size() - in.byte() % 4 % bytes.size());
  check_message(bytes);
}

}  // namespace
}  // namespace kvpush::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvpush::fuzz;
  Input in(data, size);
  switch (in.below(4)) {
    case 0:
      check_message(in.rest());
      break;
    case 1:
      check_peer_info(in.rest());
      break;
    case 2:
      check_metadata(in.rest());
      break;
    default:
      check_damaged(in);
      break;
  }
  return 0;
}
