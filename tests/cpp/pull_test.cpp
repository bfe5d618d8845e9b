// Pull: both state machines as scripts, then engines with each other.
#include <gtest/gtest.h>

#include "engine.h"
#include "support/machines.h"
#include "support/world.h"

namespace kvpush {
namespace {

using script::key_of;
using script::Lines;
using script::take;

constexpr Session kP = 7;
constexpr Session kQ = 8;

// --- the consumer -------------------------------------------------------------------------------

class PullConsumerScript : public script::ConsumerMachine {
 protected:
  PullConsumerScript() : ConsumerMachine(pull()) {}

  bool ready(Session from, Attempt attempt, std::uint32_t watermark = 32) {
    ReadyMessage message{attempt, watermark, {GroupBlocks{0, {5, 6}}}};
    return consumer.on_ready(from, message, now, out);
  }
  void read(ReadId id, Reason reason = Reason::kNone) {
    PostStats stats;
    stats.bytes = 10;
    consumer.on_read_ended(id, reason, "", stats, now, out);
  }
  bool confirmed(Session from, Attempt attempt) {
    return consumer.on_confirmed(from, {attempt}, now, out);
  }
  bool recall(Session from, Attempt attempt) {
    return consumer.on_recall(from, {attempt, Reason::kProducerAborted, ""}, now, out);
  }
  void lose(Session peer) { ConsumerMachine::lose(peer, 12 * kSecond); }
  static ConsumerConfig pull() {
    ConsumerConfig config;
    config.reads = true;
    return config;
  }
};

TEST_F(PullConsumerScript, DoneWhenEveryWriterHasConfirmedWhatWasRead) {
  grant(1, 100, {kP, kQ});
  ASSERT_EQ(out.size(), 2U);
  EXPECT_TRUE(std::get<GrantMessage>(std::get<SendAction>(out[0]).body).blocks.empty());
  EXPECT_EQ(take(out), (Lines{"to 7: GRANT 100 [0,32)", "to 8: GRANT 100 [0,32)"}));
  EXPECT_TRUE(ready(kP, 100));
  EXPECT_EQ(take(out), Lines{"read 1 from 7"});
  EXPECT_TRUE(consumer.may_read(1));
  EXPECT_FALSE(ready(kP, 100));  // twice is once
  EXPECT_FALSE(confirmed(kP, 100));
  read(1);
  EXPECT_EQ(take(out), Lines{"to 7: READ_DONE 100"});
  EXPECT_FALSE(ready(kP, 100));
  EXPECT_TRUE(ready(kQ, 100));
  read(2);
  EXPECT_EQ(take(out), (Lines{"read 2 from 8", "to 8: READ_DONE 100"}));
  EXPECT_TRUE(confirmed(kP, 100));
  EXPECT_FALSE(confirmed(kP, 100));  // the same twice does not stand for the other
  EXPECT_EQ(take(out), Lines{});
  EXPECT_TRUE(confirmed(kQ, 100));
  ASSERT_EQ(out.size(), 1U);
  EXPECT_EQ(std::get<EndAction>(out[0]).stats.bytes, 20U);
  EXPECT_EQ(take(out), Lines{"grant 1 done"});
  EXPECT_EQ(consumer.live(), 0U);
}

TEST_F(PullConsumerScript, WhatAWriterClaimsToHaveWrittenCountsForNothing) {
  grant(1, 100, {kP});
  take(out);
  EXPECT_FALSE(consumer.on_written(kP, {100, {0, 32}, 0, 1}, now, out));
  EXPECT_EQ(take(out), Lines{});
  EXPECT_EQ(consumer.live(), 1U);
}

TEST_F(PullConsumerScript, ReadDoneIsRepeatedUntilItIsAnswered) {
  grant(1, 100, {kP});
  ready(kP, 100);
  read(1);
  take(out);
  tick(2 * kSecond);
  EXPECT_EQ(take(out), Lines{"to 7: READ_DONE 100"});
  tick(2 * kSecond);
  EXPECT_EQ(take(out), Lines{"to 7: READ_DONE 100"});
  confirmed(kP, 100);
  EXPECT_EQ(take(out), Lines{"grant 1 done"});
}

TEST_F(PullConsumerScript, FewerTokensThanNeededAreNotRead) {
  grant(1, 100, {kP});
  take(out);
  EXPECT_TRUE(ready(kP, 100, 31));
  EXPECT_EQ(take(out), Lines{"to 7: REVOKE 100"});
  revoked(kP, 100);
  EXPECT_EQ(take(out), Lines{"grant 1 failed producer_short"});
}

TEST_F(PullConsumerScript, RevokeWaitsForTheReads) {
  grant(1, 100, {kP, kQ});
  ready(kP, 100);
  take(out);
  revoke(1);
  EXPECT_EQ(take(out), Lines{"to 8: REVOKE 100"});
  EXPECT_FALSE(consumer.may_read(1));
  revoked(kQ, 100);
  tick(2 * kSecond);
  EXPECT_EQ(take(out), Lines{});  // its blocks are not given back either
  read(1, Reason::kPeerLost);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKE 100"});
  tick(2 * kSecond);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKE 100"});
  revoked(kP, 100);
  EXPECT_EQ(take(out), Lines{"grant 1 revoked revoked"});
}

TEST_F(PullConsumerScript, ReadyThatComesAfterRevokeStartsNothing) {
  grant(1, 100, {kP});
  revoke(1);
  take(out);
  EXPECT_FALSE(ready(kP, 100));
  EXPECT_EQ(take(out), Lines{});
  revoked(kP, 100);
  EXPECT_EQ(take(out), Lines{"grant 1 revoked revoked"});
  EXPECT_FALSE(ready(kP, 100));  // the producer need not hold its blocks for it
  EXPECT_EQ(take(out), Lines{"to 7: REVOKE 100"});
}

TEST_F(PullConsumerScript, RecallEndsAllAndIsAnsweredWhenNothingIsRead) {
  grant(1, 100, {kP, kQ});
  ready(kP, 100);
  ready(kQ, 100);
  take(out);
  EXPECT_TRUE(recall(kP, 100));
  EXPECT_EQ(take(out), Lines{});
  read(2);
  EXPECT_EQ(take(out), Lines{"to 8: REVOKE 100"});
  read(1);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKE 100"});
  revoked(kP, 100);
  revoked(kQ, 100);
  EXPECT_EQ(take(out), Lines{"grant 1 failed producer_aborted"});
  EXPECT_FALSE(recall(kP, 100));
  EXPECT_EQ(take(out), Lines{"to 7: REVOKE 100"});
}

TEST_F(PullConsumerScript, FailedReadEndsTheGrantForEveryWriter) {
  grant(1, 100, {kP, kQ});
  ready(kP, 100);
  ready(kQ, 100);
  take(out);
  read(1, Reason::kTransportError);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKE 100"});
  revoked(kP, 100);
  EXPECT_EQ(take(out), Lines{});  // the sibling's READs are still in flight
  read(2);
  EXPECT_EQ(take(out), Lines{"to 8: REVOKE 100"});
  revoked(kQ, 100);
  EXPECT_EQ(take(out), Lines{"grant 1 failed transport_error"});
}

TEST_F(PullConsumerScript, UnconfirmedReadsAreNotReceived) {
  grant(1, 100, {kP});
  ready(kP, 100);
  read(1);
  take(out);
  EXPECT_TRUE(revoked(kP, 100));  // it no longer knows the attempt
  EXPECT_EQ(take(out), Lines{"grant 1 failed peer_lost"});
  grant(2, 200, {kP});
  ready(kP, 200);
  read(2);
  take(out);
  EXPECT_TRUE(failed(kP, 200));
  EXPECT_EQ(take(out), Lines{"grant 2 failed producer_aborted"});
}

TEST_F(PullConsumerScript, LostProducerNeedsNoFenceButItsReadsMustEnd) {
  grant(1, 100, {kP});
  take(out);
  lose(kP);
  EXPECT_EQ(take(out), Lines{"grant 1 failed peer_lost"});
  grant(2, 200, {kP});
  ready(kP, 200);
  take(out);
  lose(kP);
  lose(kP);
  EXPECT_FALSE(consumer.may_read(1));
  tick(60 * kSecond);
  EXPECT_EQ(take(out), Lines{});
  read(1, Reason::kTransportError);
  EXPECT_EQ(take(out), Lines{"grant 2 failed peer_lost"});
}

TEST_F(PullConsumerScript, FailedThatComesWhileReadingWaitsForTheReads) {
  grant(1, 100, {kP});
  ready(kP, 100);
  take(out);
  EXPECT_TRUE(failed(kP, 100));
  EXPECT_EQ(take(out), Lines{});
  read(1);
  EXPECT_EQ(take(out), Lines{"grant 1 failed producer_aborted"});
}

TEST_F(PullConsumerScript, StuckReadsDropTheProducerInTheEnd) {
  grant(1, 100, {kP}, {0, 32}, now + kSecond);
  ready(kP, 100);
  take(out);
  tick(kSecond);
  EXPECT_EQ(take(out), Lines{});
  tick(20 * kSecond);
  EXPECT_EQ(take(out), Lines{"drop 7"});
  lose(kP);
  EXPECT_EQ(take(out), Lines{});  // RMA can't be cancelled: the blocks stay where they are
  read(1, Reason::kTransportError);
  EXPECT_EQ(take(out), Lines{"grant 1 failed deadline"});
}

TEST_F(PullConsumerScript, EmptySpanIsDoneWhenItIsAccepted) {
  grant(1, 100, {kP}, {32, 32});
  EXPECT_EQ(take(out), Lines{"to 7: GRANT 100 [32,32)"});
  EXPECT_TRUE(consumer.on_accepted(kP, {100}, now, out));
  EXPECT_EQ(take(out), Lines{"grant 1 done"});
}

// --- the producer -------------------------------------------------------------------------------

class PullProducerScript : public script::ProducerMachine {
 protected:
  PullProducerScript() : ProducerMachine(pull()) {}

  void offer(Ticket ticket, std::uint32_t watermark, bool final,
             std::vector<BlockId> blocks = {1}) {
    ProducerMachine::offer(ticket, watermark, final, "r", std::move(blocks));
  }
  void read_done(Session from, Attempt attempt) {
    producer.on_read_done(from, {attempt}, now, out);
  }
  void lose(Session peer, DurationNs fence) { producer.on_peer_lost(peer, now + fence, now, out); }
  static ProducerConfig pull() {
    ProducerConfig config;
    config.reads = true;
    return config;
  }
};

TEST_F(PullProducerScript, ReadyWhenTheOfferIsFinalAndFreeWhenItWasRead) {
  grant(kP, 100);
  EXPECT_EQ(take(out), Lines{"to 7: ACCEPTED 100"});
  offer(1, 16, false, {1});
  EXPECT_EQ(take(out), Lines{});
  offer(1, 32, true, {2});
  ASSERT_EQ(out.size(), 1U);
  EXPECT_EQ(std::get<ReadyMessage>(std::get<SendAction>(out[0]).body).blocks,
            (BlockTable{GroupBlocks{0, {1, 2}}}));
  EXPECT_EQ(take(out), Lines{"to 7: READY 100 32"});
  read_done(kP, 100);
  EXPECT_EQ(take(out), (Lines{"to 7: CONFIRMED 100", "offer 1 done"}));
  expect_at_rest();
}

TEST_F(PullProducerScript, EachRankOfTheConsumerReadsBeforeTheOfferEnds) {
  offer(1, 32, true);
  grant(kP, 100, {0, 32}, 2);
  EXPECT_EQ(take(out), (Lines{"to 7: ACCEPTED 100", "to 7: READY 100 32"}));
  read_done(kP, 100);
  EXPECT_EQ(take(out), Lines{"to 7: CONFIRMED 100"});
  grant(kQ, 100, {0, 32}, 2);
  read_done(kQ, 100);
  EXPECT_EQ(take(out), (Lines{"to 8: ACCEPTED 100", "to 8: READY 100 32", "to 8: CONFIRMED 100",
                              "offer 1 done"}));
  expect_at_rest();
}

TEST_F(PullProducerScript, RepeatedMessagesAreAnsweredAsTheFirstOnes) {
  offer(1, 32, true);
  grant(kP, 100);
  take(out);
  grant(kP, 100);
  EXPECT_EQ(take(out), Lines{"to 7: READY 100 32"});
  read_done(kP, 100);
  take(out);
  read_done(kP, 100);
  EXPECT_EQ(take(out), Lines{"to 7: CONFIRMED 100"});
  read_done(kP, 999);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKED 999"});
  grant(kP, 999);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKED 999"}) << "what was told to be over stays so";
}

TEST_F(PullProducerScript, ReadDoneWithoutReadyMeansNothing) {
  grant(kP, 100);
  take(out);
  read_done(kP, 100);
  EXPECT_EQ(take(out), Lines{});
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"to 7: READY 100 32"});
}

TEST_F(PullProducerScript, RevokeSaysThatNothingIsRead) {
  offer(1, 32, true);
  grant(kP, 100);
  take(out);
  revoke(kP, 100);
  EXPECT_EQ(take(out), (Lines{"to 7: REVOKED 100", "offer 1 failed revoked"}));
  read_done(kP, 100);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKED 100"});
  expect_at_rest();
}

TEST_F(PullProducerScript, WithdrawnBlocksAreHeldUntilTheReaderAnswers) {
  offer(1, 32, true);
  grant(kP, 100);
  take(out);
  withdraw(1);
  EXPECT_EQ(take(out), Lines{"to 7: RECALL 100 producer_aborted"});
  tick(2 * kSecond);
  EXPECT_EQ(take(out), Lines{"to 7: RECALL 100 producer_aborted"});
  revoke(kP, 100);
  EXPECT_EQ(take(out), (Lines{"to 7: REVOKED 100", "offer 1 failed producer_aborted"}));
  expect_at_rest();
}

TEST_F(PullProducerScript, ReadDoneThatCrossesARecallIsNotConfirmed) {
  offer(1, 32, true);
  grant(kP, 100);
  withdraw(1);
  take(out);
  read_done(kP, 100);
  EXPECT_EQ(take(out),
            (Lines{"to 7: FAILED 100 producer_aborted", "offer 1 failed producer_aborted"}));
  read_done(kP, 100);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKED 100"});
  expect_at_rest();
}

TEST_F(PullProducerScript, UnansweredRecallDropsTheConsumer) {
  offer(1, 32, true);
  grant(kP, 100);
  withdraw(1);
  take(out);
  tick(20 * kSecond);
  EXPECT_EQ(take(out), Lines{"drop 7"});
  lose(kP, 12 * kSecond);
  tick(11 * kSecond);
  EXPECT_EQ(take(out), Lines{});
  tick(kSecond);
  EXPECT_EQ(take(out), Lines{"offer 1 failed producer_aborted"});
  expect_at_rest();
}

TEST_F(PullProducerScript, LostReaderIsFencedBeforeBlocksGoBack) {
  offer(1, 32, true);
  grant(kP, 100);
  take(out);
  lose(kP, 12 * kSecond);
  tick(12 * kSecond - 1);
  EXPECT_EQ(take(out), Lines{});
  tick(1);
  EXPECT_EQ(take(out), Lines{"offer 1 failed peer_lost"});
  expect_at_rest();
}

TEST_F(PullProducerScript, ReaderThatSaidGoodbyeReadsNoMore) {
  offer(1, 32, true);
  grant(kP, 100);
  take(out);
  lose(kP, 0);
  EXPECT_EQ(take(out), Lines{"offer 1 failed peer_lost"});
  expect_at_rest();
}

TEST_F(PullProducerScript, ReaderThatNeverEndsIsRecalled) {
  offer(1, 32, true);
  grant(kP, 100);
  take(out);
  tick(ProducerConfig{}.grant_ttl - 1);
  EXPECT_EQ(take(out), Lines{});
  tick(1);
  EXPECT_EQ(take(out), Lines{"to 7: RECALL 100 offer_expired"});
}

TEST_F(PullProducerScript, TooFewTokensAreNeverReady) {
  grant(kP, 100, {0, 33});
  take(out);
  offer(1, 32, true);
  EXPECT_EQ(take(out), (Lines{"to 7: FAILED 100 producer_short", "offer 1 failed producer_short"}));
  expect_at_rest();
}

TEST_F(PullProducerScript, MoreBlocksThanAReadyMayNameFailThatTransfer) {
  grant(kP, 100);
  take(out);
  offer(1, 32, true, std::vector<BlockId>(kMaxBlocksPerGrant + 1, 3));
  EXPECT_EQ(take(out), (Lines{"to 7: FAILED 100 bad_request", "offer 1 failed bad_request"}));
  expect_at_rest();
}

// --- engines ------------------------------------------------------------------------------------

class PullEngineTest : public EngineWorld {
 protected:
  static EngineConfig pull() {
    EngineConfig config;
    config.pull = true;
    return config;
  }
  TestRank& p = add("P", 10, pull());
  TestRank& d = add("D", 20, pull());
};

TEST_F(PullEngineTest, KvIsReadFromTheOffer) {
  expect_kv_goes_from_offer_to_grant(d, p);
  EXPECT_GT(d.engine->counters().bytes_read, 0U);
  EXPECT_EQ(p.engine->counters().writes_posted, 0U);
}

TEST_F(PullEngineTest, BothDirectionsAtOnce) {
  meet(d, p);
  meet(p, d);
  p.fill_block(1, 10);
  d.fill_block(1, 30);
  d.grant(5, 100, key_of("there"), {4}, {10});
  p.grant(7, 200, key_of("back"), {5}, {20});
  p.offer(6, key_of("there"), {1});
  d.offer(8, key_of("back"), {1});
  pass(10 * kMillisecond);
  EXPECT_EQ(d.take<EndAction>().size(), 2U);
  EXPECT_EQ(p.take<EndAction>().size(), 2U);
  EXPECT_TRUE(d.block_is(4, 10));
  EXPECT_TRUE(p.block_is(5, 30));
}

TEST_F(PullEngineTest, ConsumerThatWasStoppedDoesNotTrustWhatLayUnread) {
  meet(d, p);
  pass(kSecond);
  d.fill_block(4, 50);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  p.offer(6, key_of("r"), {1});
  pass(30 * kSecond, &d);  // READY lies unread; P has lost D, and waited for its fence
  expect_end(p, 6, End::kFailed, Reason::kPeerLost);
  pass(30 * kSecond);
  expect_end(d, 5, End::kFailed, Reason::kPeerLost);
  EXPECT_EQ(d.engine->counters().reads_posted, 0U);
  EXPECT_TRUE(d.block_is(4, 50));
  expect_at_rest(d);
}

TEST_F(PullEngineTest, ReadyOfAnotherMeetingIsNotRead) {
  meet(d, p);
  for (int i = 0; i < 15; ++i) {  // P says nothing; what comes under its name serves no meeting
    Message keepalive{10, KeepaliveMessage{}};
    keepalive.serving = 9;
    keepalive.echo = static_cast<std::uint64_t>(d.clock.now());
    ASSERT_TRUE(p.transport->notify("D", encode_message(keepalive)).is_ok());
    pass(kSecond, &p);
  }
  d.grant(5, 100, key_of("r"), {4}, {10});
  Message ready{10, ReadyMessage{100, 4, {GroupBlocks{0, {1}}}}};
  ASSERT_TRUE(p.transport->notify("D", encode_message(ready)).is_ok());
  pass(10 * kMillisecond, &p);
  EXPECT_EQ(d.engine->counters().reads_posted, 0U);
}

TEST_F(PullEngineTest, ProducerHoldsItsBlocksForAConsumerThatStops) {
  meet(d, p);
  pass(kSecond);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  p.offer(6, key_of("r"), {1});
  p.tick();
  pass(21 * kSecond, &d);  // ten seconds of silence, and then twelve of fence
  EXPECT_TRUE(p.take<EndAction>().empty());
  pass(3 * kSecond, &d);
  expect_end(p, 6, End::kFailed, Reason::kPeerLost);
}

TEST_F(PullEngineTest, ShutDownProducerCallsItsReadersBack) {
  meet(d, p);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(5 * kMillisecond);
  p.offer(6, key_of("r"), {1});
  p.engine->handle(ShutdownCommand{});
  pass(20 * kMillisecond);
  EXPECT_TRUE(p.engine->drained());
  EXPECT_EQ(p.take<EndAction>().size(), 1U);
  EXPECT_EQ(d.take<EndAction>().size(), 1U);
  expect_at_rest(d);
}

}  // namespace
}  // namespace kvpush
