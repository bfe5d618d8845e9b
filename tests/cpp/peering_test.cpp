#include "peering.h"

#include <string>

#include <gtest/gtest.h>

#include "support/tiny_regions.h"

namespace kvpush {
namespace {

PeerInfo rank(Session session, std::uint32_t first, std::uint32_t heads) {
  PeerInfo info;
  info.session = session;
  info.engine_id = "engine" + std::to_string(session / 10);
  info.facts = {{"model", "tiny"}};
  info.regions = tiny_regions(session * 0x10000, 4, first, heads, 4);
  return info;
}

TEST(Peering, EachConsumerRankMeetsTheRanksThatHoldItsHeads) {
  const std::vector<PeerInfo> producers{rank(10, 0, 2), rank(11, 2, 2)};
  const std::vector<PeerInfo> whole{rank(20, 0, 4)};
  const auto both = find_targets(producers, whole, 0);
  ASSERT_TRUE(both.is_ok()) << both.message();
  ASSERT_EQ(both.value().size(), 2U);
  EXPECT_EQ(both.value()[0].info.session, 10U);
  EXPECT_EQ(both.value()[1].info.session, 11U);
  EXPECT_EQ(both.value()[0].fan_out, 1U);

  const auto second = find_targets(producers, std::vector{rank(20, 0, 2), rank(21, 2, 2)}, 1);
  ASSERT_TRUE(second.is_ok());
  ASSERT_EQ(second.value().size(), 1U);
  EXPECT_EQ(second.value()[0].info.session, 11U);

  const auto split = find_targets(whole, producers, 0);
  ASSERT_TRUE(split.is_ok());
  ASSERT_EQ(split.value().size(), 1U);
  EXPECT_EQ(split.value()[0].fan_out, 2U);
}

// All ranks of an MLA engine hold the same latent: one is enough, the others must be told so.
TEST(Peering, RanksThatNobodyNeedsAreSharedOutToBeTold) {
  std::vector<PeerInfo> producers{rank(10, 0, 4), rank(11, 0, 4), rank(12, 0, 4)};
  std::vector<PeerInfo> consumers{rank(20, 0, 4)};
  for (std::vector<PeerInfo>* side : {&producers, &consumers}) {
    for (PeerInfo& info : *side) {
      for (Region& region : info.regions) {
        region.replicated = true;
      }
    }
  }
  const auto targets = find_targets(producers, consumers, 0);
  ASSERT_TRUE(targets.is_ok()) << targets.message();
  ASSERT_EQ(targets.value().size(), 3U);
  std::size_t pairs = 0;
  for (const PeerTarget& target : targets.value()) {
    EXPECT_EQ(target.fan_out, 1U);
    pairs += target.pairs.size();
  }
  EXPECT_EQ(pairs, consumers[0].regions.size());

  consumers.push_back(consumers[0]);
  consumers[1].session = 21;
  std::size_t told = 0;
  for (std::size_t index = 0; index < consumers.size(); ++index) {
    const auto share = find_targets(producers, consumers, index);
    ASSERT_TRUE(share.is_ok());
    for (const PeerTarget& target : share.value()) {
      told += target.pairs.empty() ? 1U : 0U;
    }
  }
  EXPECT_LE(told, 1U);  // three ranks, two of which write
}

TEST(Peering, MismatchesAreErrorsThatNameThem) {
  std::vector<PeerInfo> producers{rank(10, 0, 4)};
  const std::vector<PeerInfo> consumers{rank(20, 0, 4)};
  EXPECT_FALSE(find_targets({}, consumers, 0).is_ok());
  EXPECT_FALSE(find_targets(producers, consumers, 1).is_ok());
  producers[0].facts[0].second = "other";
  EXPECT_NE(find_targets(producers, consumers, 0).message().find("other"), std::string::npos);
}

TEST(Peering, TwoRanksOfOneSessionAreRefused) {
  const std::vector<PeerInfo> producers{rank(10, 0, 2), rank(10, 2, 2)};
  const auto targets = find_targets(producers, std::vector{rank(20, 0, 4)}, 0);
  EXPECT_NE(targets.message().find("session"), std::string::npos);
}

TEST(Peering, PairsOffTheWireAreChecked) {
  const std::vector<Region> here = rank(10, 0, 4).regions;
  const std::vector<Region> there = rank(20, 2, 2).regions;
  const auto check = [&](RegionPair pair) { return check_pairs(here, there, std::vector{pair}); };
  EXPECT_TRUE(check({0, 0, 2, 4}).is_ok());
  EXPECT_TRUE(check({1, 1, 3, 4}).is_ok());
  EXPECT_FALSE(check({2, 0, 2, 4}).is_ok());  // no such region here
  EXPECT_FALSE(check({0, 9, 2, 4}).is_ok());  // nor there
  EXPECT_FALSE(check({0, 1, 2, 4}).is_ok());  // another layer
  EXPECT_FALSE(check({0, 0, 1, 4}).is_ok());  // heads that it does not hold
  EXPECT_FALSE(check({0, 0, 3, 3}).is_ok());  // none
}

}  // namespace
}  // namespace kvpush
