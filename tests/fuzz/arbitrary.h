// Values drawn from a fuzzer's input: small enough to collide often.
#pragma once

#include <string>
#include <type_traits>
#include <utility>
#include <variant>

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

inline Attempt arbitrary_attempt(Input& in) {
  return 1 + in.below(6);
}

inline Reason arbitrary_reason(Input& in) {
  return static_cast<Reason>(1 + in.below(kReasonCount - 1));
}

inline GrantMessage arbitrary_grant(Input& in) {
  GrantMessage grant;
  grant.attempt = arbitrary_attempt(in);
  grant.key = arbitrary_key(in);
  grant.span = arbitrary_span(in);
  grant.blocks = arbitrary_blocks(in);
  return grant;
}

inline WrittenMessage arbitrary_written(Input& in) {
  WrittenMessage written;
  written.attempt = arbitrary_attempt(in);
  written.span = arbitrary_span(in);
  written.parts = 1 + in.below(3);
  written.part = in.below(written.parts);
  return written;
}

inline FailedMessage arbitrary_failed(Input& in) {
  const Attempt attempt = arbitrary_attempt(in);
  return {attempt, arbitrary_reason(in), "as the peer says"};
}

inline ReadyMessage arbitrary_ready(Input& in) {
  ReadyMessage ready;
  ready.attempt = arbitrary_attempt(in);
  ready.watermark = in.below(33);
  ready.blocks = arbitrary_blocks(in);
  return ready;
}

inline RecallMessage arbitrary_recall(Input& in) {
  const Attempt attempt = arbitrary_attempt(in);
  return {attempt, arbitrary_reason(in), "as the peer says"};
}

inline HelloMessage arbitrary_hello(Input& in, Session to) {
  HelloMessage hello;
  hello.to = to;
  const BytesView info = in.bytes(in.below(32));
  hello.peer_info.assign(info.begin(), info.end());
  hello.pairs.resize(in.below(3));
  hello.fan_out = in.below(3);
  return hello;
}

// One of this kind; a kind that is not known here does not compile.
template <typename Body>
Body arbitrary_message(Input& in, Session receiver) {
  const auto session = [&] { return in.below(8) == 0 ? receiver + 1 : receiver; };
  if constexpr (std::is_same_v<Body, HelloMessage>) {
    return arbitrary_hello(in, session());
  } else if constexpr (std::is_same_v<Body, WelcomeMessage>) {
    const Session to = session();
    return {to, in.below(4)};
  } else if constexpr (std::is_same_v<Body, RefuseMessage>) {
    const Session to = session();
    return {to, "as the peer says", in.below(4)};
  } else if constexpr (std::is_same_v<Body, GrantMessage>) {
    return arbitrary_grant(in);
  } else if constexpr (std::is_same_v<Body, WrittenMessage>) {
    return arbitrary_written(in);
  } else if constexpr (std::is_same_v<Body, FailedMessage>) {
    return arbitrary_failed(in);
  } else if constexpr (std::is_same_v<Body, ReadyMessage>) {
    return arbitrary_ready(in);
  } else if constexpr (std::is_same_v<Body, RecallMessage>) {
    return arbitrary_recall(in);
  } else if constexpr (std::is_empty_v<Body>) {
    return {};
  } else {
    static_assert(sizeof(Body) == sizeof(Attempt), "a kind of message that is not made here");
    return {arbitrary_attempt(in)};
  }
}

// Any kind. Every kind of MessageBody is made, so one that is added to it can't be forgotten here.
inline MessageBody arbitrary_body(Input& in, Session receiver) {
  constexpr std::size_t kKinds = std::variant_size_v<MessageBody>;
  const std::uint32_t kind = in.below(kKinds + 4);
  switch (kind) {  // those with the most in them come more often
    case kKinds:
      return arbitrary_written(in);
    case kKinds + 1:
      return arbitrary_ready(in);
    case kKinds + 2:
    case kKinds + 3:
      return arbitrary_grant(in);
    default:
      break;
  }
  return [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    MessageBody body;
    ((kIndex == kind
          ? static_cast<void>(
                body = arbitrary_message<std::variant_alternative_t<kIndex, MessageBody>>(in,
                                                                                          receiver))
          : static_cast<void>(0)),
     ...);
    return body;
  }(std::make_index_sequence<kKinds>());
}

}  // namespace kvpush::fuzz
