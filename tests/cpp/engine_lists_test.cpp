// Engines that post scattered blocks from prepared lists, once they have found the time to prepare
// them.
#include <algorithm>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "engine.h"
#include "support/script.h"
#include "support/world.h"

namespace kvpush {
namespace {

using script::key_of;

class EngineListsTest : public EngineWorld {
 protected:
  // Blocks of two layers with 8 blocks each: 16 of either side in lists.
  static constexpr std::uint64_t kAllBlocks = 2 * 2 * std::uint64_t{TestRank::kBlocks};

  static EngineConfig config(bool pull, std::uint64_t max_prepared_blocks = kAllBlocks) {
    EngineConfig config;
    config.pull = pull;
    config.lists.min_descriptors = 4;
    config.max_prepared_blocks = max_prepared_blocks;
    return config;
  }

  // A request of scattered blocks from `p` to `d`, compared when it is there.
  void copy(TestRank& p, TestRank& d, Ticket ticket, int value) {
    const TransferKey key = key_of("r" + std::to_string(ticket));
    p.fill_block(1, value);
    p.fill_block(5, value + 10);
    p.fill_block(3, value + 20);
    p.offer(ticket, key, {1, 5, 3});
    d.grant(ticket, 100 + ticket, key, {7, 2, 4}, {p.info.session});
    pass(20 * kMillisecond);
    expect_end(d, ticket, End::kDone);
    expect_end(p, ticket, End::kDone);
    EXPECT_TRUE(d.block_is(7, value) && d.block_is(2, value + 10) && d.block_is(4, value + 20));
  }
};

TEST_F(EngineListsTest, TheFirstScatteredRequestPostsRunsAndTheNextFromLists) {
  for (const bool pull : {false, true}) {
    TestRank& p = add(pull ? "P2" : "P", pull ? 30 : 10, config(pull));
    TestRank& d = add(pull ? "D2" : "D", pull ? 40 : 20, config(pull));
    meet(d, p);
    TestRank& mover = pull ? d : p;
    TestRank& other = pull ? p : d;
    copy(p, d, 1, 10);
    EXPECT_EQ(mover.engine->counters().posted_from_lists, 0U);
    EXPECT_EQ(mover.engine->counters().prepared_blocks, kAllBlocks);
    EXPECT_EQ(mover.transport->counts().lists, 1U);
    copy(p, d, 2, 50);
    EXPECT_EQ(mover.engine->counters().posted_from_lists, 1U);
    EXPECT_EQ(other.transport->counts().lists, 0U) << "only who posts has use for them";
    EXPECT_EQ(mover.engine->counters().prepared_blocks, kAllBlocks) << "once is enough";
  }
}

TEST_F(EngineListsTest, NoneArePreparedBeyondTheLimit) {
  TestRank& p = add("P", 10, config(false, kAllBlocks - 1));
  TestRank& d = add("D", 20, config(false));
  meet(d, p);
  copy(p, d, 1, 10);
  copy(p, d, 2, 50);
  EXPECT_EQ(p.engine->counters().prepared_blocks, 0U);
  EXPECT_EQ(p.engine->counters().posted_from_lists, 0U);
  EXPECT_EQ(p.engine->tick(), Activity::kIdle) << "what can't be had is not asked for again";
}

TEST_F(EngineListsTest, ALostPeersListsMakeRoomForAnothers) {
  TestRank& p = add("P", 10, config(false));
  TestRank& first = add("D", 20, config(false));
  meet(first, p);
  copy(p, first, 1, 10);
  TestRank& second = add("E", 30, config(false));
  meet(second, p);
  copy(p, second, 2, 20);
  copy(p, second, 3, 30);
  EXPECT_EQ(p.engine->counters().posted_from_lists, 0U) << "the first one's fill the limit";
  first.engine->handle(ShutdownCommand{});
  first.engine->say_goodbye();
  pass(20 * kMillisecond);
  EXPECT_EQ(p.engine->counters().prepared_blocks, 0U);
  EXPECT_EQ(p.transport->counts().lists, 0U);
  TestRank& third = add("F", 40, config(false));
  meet(third, p);
  copy(p, third, 4, 40);
  copy(p, third, 5, 50);
  EXPECT_EQ(p.engine->counters().posted_from_lists, 1U);
}

// As over shared memory to a process that is stopped: that one transfer must not keep all peers
// from having lists.
TEST_F(EngineListsTest, ATransferThatDoesNotEndDelaysThemOnly) {
  sim::FabricFaults slow;
  slow.write_max = 1'000 * kSecond;
  sim::SimFabric other{queue, sim::Random(1), slow};
  ranks.push_back(std::make_unique<TestRank>(queue, other, "P", 10, config(false)));
  ranks.push_back(std::make_unique<TestRank>(queue, other, "D", 20, config(false)));
  TestRank& p = *ranks[0];
  TestRank& d = *ranks[1];
  meet(d, p);
  p.offer(1, key_of("r"), {1, 5, 3});
  d.grant(1, 100, key_of("r"), {7, 2, 4}, {10});
  pass(50 * kMillisecond);
  EXPECT_EQ(p.engine->counters().handles_in_flight, 1U);
  EXPECT_EQ(p.transport->counts().lists, 0U);
  pass(100 * kMillisecond);
  EXPECT_EQ(p.engine->counters().handles_in_flight, 1U);
  EXPECT_EQ(p.transport->counts().lists, 1U);
  ranks.clear();  // before their fabric
}

// The transport forgets lists when it loads a peer anew, which may happen behind the planner's
// back.
TEST_F(EngineListsTest, WhatTheTransportHasForgottenIsPostedAsRuns) {
  TestRank& p = add("P", 10, config(false));
  TestRank& d = add("D", 20, config(false));
  meet(d, p);
  copy(p, d, 1, 10);
  ASSERT_EQ(p.transport->counts().lists, 1U);
  ASSERT_TRUE(p.transport->add_peer(d.info.transport_metadata).is_ok());
  ASSERT_EQ(p.transport->counts().lists, 0U);
  copy(p, d, 2, 50);
  EXPECT_EQ(p.engine->counters().posted_from_lists, 0U);
}

}  // namespace
}  // namespace kvpush
