// Values drawn from a fuzzer's input: small enough to collide often.
#pragma once

#include <string>

#include "input.h"
#include "message.h"

namespace kvpush::fuzz {

inline TransferKey arbitrary_key(Input& in) {
  TransferKey key;
  key.transfer_id.assign(1, static_cast<char>('a' + in.below(3)));
  key.fingerprint.bytes.fill(static_cast<std::uint8_t>(in.below(2)));
  return key;
}

inline TokenSpan arbitrary_span(Input& in) {
  TokenSpan span;
  span.begin = in.below(16);
  span.end = span.begin + in.below(17);
  return span;
}

inline BlockTable arbitrary_blocks(Input& in) {
  BlockTable table(in.below(3));
  for (GroupBlocks& group : table) {
    group.first_block = in.below(4);
    for (std::uint32_t left = in.below(6); left != 0; --left) {
      const std::uint32_t id = in.below(10);
      group.ids.push_back(id == 9 ? kNoBlock : id);
    }
  }
  return table;
}

inline GrantMessage arbitrary_grant(Input& in) {
  GrantMessage grant;
  grant.attempt = 1 + in.below(6);
  grant.key = arbitrary_key(in);
  grant.span = arbitrary_span(in);
  grant.blocks = arbitrary_blocks(in);
  return grant;
}

inline WrittenMessage arbitrary_written(Input& in) {
  WrittenMessage written;
  written.attempt = 1 + in.below(6);
  written.span = arbitrary_span(in);
  written.parts = 1 + in.below(3);
  written.part = in.below(written.parts);
  return written;
}

inline FailedMessage arbitrary_failed(Input& in) {
  return {1 + in.below(6), static_cast<Reason>(1 + in.below(kReasonCount - 1)), "as the peer says"};
}

// Any kind but HELLO.
inline MessageBody arbitrary_body(Input& in, Session receiver) {
  const Attempt attempt = 1 + in.below(6);
  const Session to = in.below(8) == 0 ? receiver + 1 : receiver;
  switch (in.below(11)) {
    case 0:
      return WelcomeMessage{to, in.below(4)};
    case 1:
      return RefuseMessage{to, "as the peer says", in.below(4)};
    case 2:
      return AcceptedMessage{attempt};
    case 3:
      return arbitrary_failed(in);
    case 4:
      return RevokeMessage{attempt};
    case 5:
      return RevokedMessage{attempt};
    case 6:
      return KeepaliveMessage{};
    case 7:
      return GoodbyeMessage{};
    case 8:
    case 9:
      return arbitrary_written(in);
    default:
      return arbitrary_grant(in);
  }
}

}  // namespace kvpush::fuzz
