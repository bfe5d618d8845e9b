#include "message.h"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/noise.h"

namespace kvpush {
namespace {

TransferKey some_key() {
  TransferKey key;
  key.transfer_id = "transfer-1";
  for (std::size_t i = 0; i < key.fingerprint.bytes.size(); ++i) {
    key.fingerprint.bytes[i] = static_cast<std::uint8_t>(i * 17);
  }
  return key;
}

GrantMessage grant_of(std::vector<BlockId> ids) {
  return {3, some_key(), {16, 96}, {GroupBlocks{1, std::move(ids)}, GroupBlocks{}}};
}

// One of each kind at least, with values at the edges.
std::vector<Message> samples() {
  const std::uint64_t most = ~std::uint64_t{0};
  std::vector<MessageBody> bodies{
      HelloMessage{5, Bytes(40, std::byte{9}), {{0, 1, 2, 4}, {3, 3, 0, 8}}, 2},
      HelloMessage{},
      WelcomeMessage{5, 1},
      WelcomeMessage{most, most},
      RefuseMessage{5, "the peer does not match", 3},
      grant_of({4, 5, 6, 3, 2, 1, kNoBlock, kNoBlock, 9, 0xFFFF'FFFE}),
      grant_of({}),
      AcceptedMessage{3},
      WrittenMessage{3, {0, 0xFFFF'FFFF}, 2, 3},
      FailedMessage{most, Reason::kCancelled, "why"},
      RevokeMessage{3},
      RevokedMessage{3},
      KeepaliveMessage{},
      GoodbyeMessage{},
      ReadyMessage{3, 0xFFFF'FFFF, {GroupBlocks{1, {4, 5, kNoBlock}}, GroupBlocks{}}},
      ReadDoneMessage{3},
      ConfirmedMessage{3},
      RecallMessage{most, Reason::kOfferExpired, "why"}};
  std::vector<Message> messages;
  for (MessageBody& body : bodies) {
    Message message{77, std::move(body)};
    message.meeting = messages.size();
    message.stamp = messages.size() * 1'000'000'007;
    message.echo = messages.empty() ? most : 1;
    message.serving = messages.size() % 3;
    messages.push_back(std::move(message));
  }
  return messages;
}

TEST(Message, EveryKindSurvivesTheWire) {
  for (const Message& message : samples()) {
    const Result<Message> parsed = parse_message(encode_message(message));
    ASSERT_TRUE(parsed.is_ok()) << message_name(message.body) << ": " << parsed.message();
    EXPECT_TRUE(parsed.value() == message) << message_name(message.body);
  }
}

TEST(Message, NoTruncationAndNoExcessIsAMessage) {
  for (const Message& message : samples()) {
    Bytes bytes = encode_message(message);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(parse_message(BytesView(bytes).first(size)).is_ok())
          << message_name(message.body) << " cut to " << size;
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(parse_message(bytes).is_ok()) << message_name(message.body);
  }
}

TEST(Message, AnyBytesAreAMessageOrAnError) {
  Noise noise(1);
  for (int i = 0; i < 100'000; ++i) {
    Bytes bytes = noise.bytes(noise.below(64));
    if (bytes.size() > 2 && noise.below(4) != 0) {  // past the first two checks
      bytes[0] = std::byte{kMessageVersion};
      bytes[1] = static_cast<std::byte>(noise.below(16));
    }
    const Result<Message> parsed = parse_message(bytes);
    if (parsed.is_ok()) {
      EXPECT_TRUE(parse_message(encode_message(parsed.value())).value() == parsed.value());
    }
  }
}

TEST(Message, DamagedMessagesAreAMessageOrAnError) {
  Noise noise(2);
  const std::vector<Message> messages = samples();
  for (int i = 0; i < 100'000; ++i) {
    Bytes bytes = encode_message(messages[noise.below(messages.size())]);
    for (std::uint64_t flips = 1 + noise.below(4); flips > 0; --flips) {
      bytes[noise.below(bytes.size())] = static_cast<std::byte>(noise.below(256));
    }
    const Result<Message> parsed = parse_message(bytes);
    if (parsed.is_ok()) {
      EXPECT_TRUE(parse_message(encode_message(parsed.value())).value() == parsed.value());
    }
  }
}

TEST(Message, BlockIdsTravelAsRuns) {
  constexpr std::size_t kMany = 300'000;
  std::vector<BlockId> up;
  std::vector<BlockId> down;
  std::vector<BlockId> singles;
  for (std::size_t i = 0; i < kMany; ++i) {
    up.push_back(static_cast<BlockId>(7 + i));
    down.push_back(static_cast<BlockId>(kMany - i));
    singles.push_back(static_cast<BlockId>(i * 7919 % 1'000'003));
  }
  std::vector<BlockId> holes(kMany, kNoBlock);
  for (const std::vector<BlockId>* ids : {&up, &down, &holes, &singles}) {
    const Message message{1, grant_of(*ids)};
    const Bytes bytes = encode_message(message);
    EXPECT_LT(bytes.size(), ids == &singles ? 5 * kMany : 80U);
    const Result<Message> parsed = parse_message(bytes);
    ASSERT_TRUE(parsed.is_ok());
    EXPECT_TRUE(parsed.value() == message);
  }
}

TEST(Message, RandomBlockListsSurvive) {
  Noise noise(3);
  for (int i = 0; i < 2'000; ++i) {
    std::vector<BlockId> ids;
    while (ids.size() < 50) {
      const auto start = static_cast<BlockId>(noise.below(4) == 0 ? 0xFFFF'FFF0 : noise.below(64));
      const std::uint64_t kind = noise.below(3);
      for (std::uint64_t k = noise.below(6); k > 0; --k) {
        ids.push_back(kind == 0 ? kNoBlock : kind == 1 ? start + static_cast<BlockId>(k) : start);
      }
    }
    const Message message{1, grant_of(ids)};
    const Result<Message> parsed = parse_message(encode_message(message));
    ASSERT_TRUE(parsed.is_ok());
    EXPECT_TRUE(parsed.value() == message);
  }
}

// A header, a GRANT's first fields, then `tail`.
Bytes grant_with(std::vector<std::uint8_t> tail) {
  Bytes bytes = encode_message({1, GrantMessage{3, some_key(), {0, 16}, {}}});
  bytes.pop_back();  // the number of groups
  for (const std::uint8_t byte : tail) {
    bytes.push_back(static_cast<std::byte>(byte));
  }
  return bytes;
}

TEST(Message, LyingCountsAreRefused) {
  EXPECT_TRUE(parse_message(grant_with({0})).is_ok());
  EXPECT_TRUE(parse_message(grant_with({1, 0, 1, 1 << 2, 0})).is_ok());
  EXPECT_FALSE(parse_message(grant_with({65})).is_ok());                        // groups
  EXPECT_FALSE(parse_message(grant_with({1, 0, 0xFF, 0xFF, 0x7F})).is_ok());    // ids, none there
  EXPECT_FALSE(parse_message(grant_with({1, 0, 1, 2 << 2, 0})).is_ok());        // a run too long
  EXPECT_FALSE(parse_message(grant_with({1, 0, 1, 0, 0})).is_ok());             // an empty run
  EXPECT_FALSE(parse_message(grant_with({1, 0, 1, (1 << 2) | 3, 0})).is_ok());  // no such step
  EXPECT_FALSE(parse_message(grant_with({1, 0, 1, 1 << 2, 1})).is_ok());        // id -1
  EXPECT_FALSE(parse_message(grant_with({1, 0, 2, (2 << 2) | 1, 0})).is_ok());  // 0, then -1
}

TEST(Message, OneByteTooManyBlocksIsRefused) {
  const Message most{1, grant_of(std::vector<BlockId>(kMaxBlocksPerGrant, kNoBlock))};
  EXPECT_TRUE(parse_message(encode_message(most)).is_ok());
  const Message more{1, grant_of(std::vector<BlockId>(kMaxBlocksPerGrant + 1, kNoBlock))};
  EXPECT_FALSE(parse_message(encode_message(more)).is_ok());
}

TEST(Message, AnotherVersionIsNamed) {
  Bytes bytes = encode_message({1, KeepaliveMessage{}});
  bytes[0] = std::byte{9};
  EXPECT_NE(parse_message(bytes).message().find("version 9"), std::string::npos);
}

TEST(Message, FailureWithoutAReasonIsNoMessage) {
  const Message whole{1, FailedMessage{2, Reason::kCancelled, "why"}};
  EXPECT_TRUE(parse_message(encode_message(whole)).is_ok());
  const Message bare{1, FailedMessage{2, Reason::kNone, "why"}};
  EXPECT_FALSE(parse_message(encode_message(bare)).is_ok());
}

TEST(Message, ZeroIsNoSessionAndNoAttempt) {
  EXPECT_FALSE(parse_message(encode_message({0, KeepaliveMessage{}})).is_ok());
  EXPECT_FALSE(parse_message(encode_message({1, RevokeMessage{0}})).is_ok());
}

}  // namespace
}  // namespace kvpush
