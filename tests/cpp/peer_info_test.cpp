#include "peer_info.h"

#include <string>

#include <gtest/gtest.h>

#include "support/noise.h"
#include "support/tiny_regions.h"

namespace kvpush {
namespace {

PeerInfo sample() {
  PeerInfo info;
  info.session = 42;
  info.engine_id = "engine";
  info.tp_rank = 1;
  info.tp_size = 2;
  info.facts = {{"model", "tiny"}, {"dtype", "float32"}};
  info.regions = tiny_regions(0x1000, 4, 0, 2, 2);
  info.transport_metadata = Bytes(100, std::byte{5});
  return info;
}

TEST(PeerInfo, SurvivesTheWire) {
  const PeerInfo info = sample();
  const Result<PeerInfo> parsed = decode_peer_info(encode_peer_info(info));
  ASSERT_TRUE(parsed.is_ok()) << parsed.message();
  EXPECT_TRUE(parsed.value() == info);
}

TEST(PeerInfo, SizeDoesNotGrowWithTheNumberOfBlocks) {
  PeerInfo large = sample();
  for (Region& region : large.regions) {
    region.num_blocks = 1'000'000;
  }
  EXPECT_LE(encode_peer_info(large).size(), encode_peer_info(sample()).size() + 64);
}

TEST(PeerInfo, NoTruncationAndNoExcessIsADescription) {
  Bytes bytes = encode_peer_info(sample());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode_peer_info(BytesView(bytes).first(size)).is_ok()) << size;
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(decode_peer_info(bytes).is_ok());
}

TEST(PeerInfo, DamagedBytesAreADescriptionOrAnError) {
  Noise noise(1);
  const Bytes good = encode_peer_info(sample());
  for (int i = 0; i < 100'000; ++i) {
    Bytes bytes = noise.below(4) == 0 ? noise.bytes(noise.below(300)) : good;
    for (std::uint64_t flips = noise.below(4); flips > 0 && !bytes.empty(); --flips) {
      bytes[noise.below(bytes.size())] = static_cast<std::byte>(noise.below(256));
    }
    const Result<PeerInfo> parsed = decode_peer_info(bytes);
    if (parsed.is_ok()) {
      EXPECT_TRUE(decode_peer_info(encode_peer_info(parsed.value())).value() == parsed.value());
    }
  }
}

TEST(PeerInfo, AnotherProtocolIsRefusedWithBothVersions) {
  PeerInfo info = sample();
  info.protocol = 9;
  const std::string message = decode_peer_info(encode_peer_info(info)).message();
  const std::string both = "'" + std::to_string(kProtocolVersion) + "' here and '9' on the peer";
  EXPECT_NE(message.find(both), std::string::npos) << message;
}

TEST(PeerInfo, FactsThatDifferAreNamedWithBothValues) {
  const PeerInfo here = sample();
  PeerInfo there = sample();
  EXPECT_TRUE(check_compatible(here, there).is_ok());
  there.facts[1].second = "bfloat16";
  const std::string message = check_compatible(here, there).message();
  EXPECT_NE(message.find("dtype is 'float32' here and 'bfloat16'"), std::string::npos) << message;
  there = sample();
  there.facts[0].first = "model_name";
  EXPECT_NE(check_compatible(here, there).message().find("model_name"), std::string::npos);
  there = sample();
  there.facts.pop_back();
  EXPECT_FALSE(check_compatible(here, there).is_ok());
}

}  // namespace
}  // namespace kvpush
