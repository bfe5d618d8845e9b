// Messages: what ranks say to each other in NIXL notifications. Pure: any thread.
//
// Layout: version (1 byte), kind (1 byte), sender's session (8 bytes), meeting, stamp, echo and
// serving (1 to 10 bytes each), body. parse_message() is total: any bytes give a message or an
// error, and never more memory than the bounds below allow.
//
//   consumer -> producer   HELLO  GRANT  REVOKE
//   producer -> consumer   WELCOME REFUSE  ACCEPTED  WRITTEN  FAILED  REVOKED
//   both ways              KEEPALIVE  GOODBYE
// and where the consumer READs (pull) instead of being written to:
//   consumer -> producer   READ_DONE
//   producer -> consumer   READY  CONFIRMED  RECALL
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "copy_plan.h"
#include "status.h"
#include "types.h"

namespace kvpush {

constexpr std::uint8_t kMessageVersion = 2;

// Bounds of what is accepted. 2^20 blocks of 16 tokens are a prompt of 16 million tokens.
constexpr std::size_t kMaxBlocksPerGrant = 1U << 20;  // and in one READY
constexpr std::size_t kMaxGroups = 64;
constexpr std::size_t kMaxTransferIdBytes = 256;
constexpr std::size_t kMaxDetailBytes = 1'024;
constexpr std::size_t kMaxParts = 1U << 20;
constexpr std::size_t kMaxPeerInfoBytes = kMaxRegions * 8'192;

// A consumer rank introduces itself to a producer rank, with the pairs it wants served.
struct HelloMessage {
  Session to = 0;  // the producer session that is meant
  Bytes peer_info;
  std::vector<RegionPair> pairs;  // producer_region indexes the receiver's regions
  std::uint32_t fan_out = 1;      // ranks of this consumer engine that the producer rank serves
  bool operator==(const HelloMessage&) const = default;
};
struct WelcomeMessage {
  Session to = 0;
  std::uint64_t meeting = 0;  // that of the HELLO which this answers
  bool operator==(const WelcomeMessage&) const = default;
};
struct RefuseMessage {
  Session to = 0;
  std::string detail;
  std::uint64_t meeting = 0;  // that of the HELLO which this answers
  bool operator==(const RefuseMessage&) const = default;
};
// "These blocks, these token positions, until revoked." An empty span: nothing is needed.
struct GrantMessage {
  Attempt attempt = 0;
  TransferKey key;
  TokenSpan span;
  BlockTable blocks;
  bool operator==(const GrantMessage&) const = default;
};
struct AcceptedMessage {
  Attempt attempt = 0;
  bool operator==(const AcceptedMessage&) const = default;
};
// Part `part` of `parts` of this span is in the consumer's memory. A span is complete when all its
// parts are: batches may complete in any order.
struct WrittenMessage {
  Attempt attempt = 0;
  TokenSpan span;
  std::uint32_t part = 0;
  std::uint32_t parts = 1;
  bool operator==(const WrittenMessage&) const = default;
};
// The producer gave the transfer up and will write no more.
struct FailedMessage {
  Attempt attempt = 0;
  Reason reason = Reason::kNone;
  std::string detail;
  bool operator==(const FailedMessage&) const = default;
};
struct RevokeMessage {
  Attempt attempt = 0;
  bool operator==(const RevokeMessage&) const = default;
};
// The answer to REVOKE: nothing of this attempt will be written any more.
struct RevokedMessage {
  Attempt attempt = 0;
  bool operator==(const RevokedMessage&) const = default;
};
// Pull: the KV of tokens [0, watermark) lies in these blocks of the producer, and stays there until
// the consumer has answered. Answered by READ_DONE, or REVOKE.
struct ReadyMessage {
  Attempt attempt = 0;
  std::uint32_t watermark = 0;
  BlockTable blocks;
  bool operator==(const ReadyMessage&) const = default;
};
// Pull: every READ of this attempt has ended well, and there will be no more.
struct ReadDoneMessage {
  Attempt attempt = 0;
  bool operator==(const ReadDoneMessage&) const = default;
};
// The answer to READ_DONE: the blocks were held until it came, so what was read is right.
struct ConfirmedMessage {
  Attempt attempt = 0;
  bool operator==(const ConfirmedMessage&) const = default;
};
// Pull: the producer gives the transfer up and wants its blocks back. Answered by REVOKE once no
// READ is in flight.
struct RecallMessage {
  Attempt attempt = 0;
  Reason reason = Reason::kNone;
  std::string detail;
  bool operator==(const RecallMessage&) const = default;
};
struct KeepaliveMessage {
  bool operator==(const KeepaliveMessage&) const = default;
};
struct GoodbyeMessage {
  bool operator==(const GoodbyeMessage&) const = default;
};

using MessageBody =
    std::variant<HelloMessage, WelcomeMessage, RefuseMessage, GrantMessage, AcceptedMessage,
                 WrittenMessage, FailedMessage, RevokeMessage, RevokedMessage, KeepaliveMessage,
                 GoodbyeMessage, ReadyMessage, ReadDoneMessage, ConfirmedMessage, RecallMessage>;

// The numbers after `body` prove that a peer is alive and still means what it said: a consumer what
// it granted, a producer what it holds for READs. A message may lie unread or travel for as long as
// it likes, so its arrival proves nothing about now.
struct Message {
  Session from = 0;
  MessageBody body;
  // Counts the sender's meetings with the receiver as its consumer; 0: it is not its consumer.
  // What a consumer granted in one meeting ends with it.
  std::uint64_t meeting = 0;
  std::uint64_t stamp = 0;  // the sender's clock; means nothing to the receiver; 0: none
  std::uint64_t echo = 0;   // the latest stamp of the receiver that the sender has seen; 0: none
  // The receiver's meeting in which the sender serves it as its consumer; 0: it does not.
  std::uint64_t serving = 0;
  bool operator==(const Message&) const = default;
};

Bytes encode_message(const Message& message);
Result<Message> parse_message(BytesView bytes);

// For log lines: "GRANT", "WRITTEN", ...
std::string_view message_name(const MessageBody& body) noexcept;

}  // namespace kvpush
