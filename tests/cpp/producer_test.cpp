// The producer's state machine, as scripts: what goes in, then what comes out.
#include "producer.h"

#include <gtest/gtest.h>

#include "support/machines.h"

namespace kvpush {
namespace {

using script::key_of;
using script::Lines;
using script::take;

constexpr Session kD = 7;
constexpr Session kD2 = 8;  // the second rank of the same consumer engine

class ProducerScript : public script::ProducerMachine {
 protected:
  ProducerScript() : ProducerMachine({}, {GroupBlocks{0, {5, 6}}}) {}

  void offer(Ticket ticket, std::uint32_t watermark, bool final, const std::string& id = "r",
             std::vector<BlockId> blocks = {1}) {
    ProducerMachine::offer(ticket, watermark, final, id, std::move(blocks));
  }
  void posted(ServeId serve, Reason reason = Reason::kNone) {
    producer.on_post_ended(serve, reason, "", {}, now, out);
  }

  static constexpr Session kE = kOtherEngine;
};

TEST_F(ProducerScript, OfferThenGrant) {
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{});
  grant(kD, 100);
  EXPECT_EQ(take(out), (Lines{"to 7: ACCEPTED 100", "post 1 to 7 [0,32) last"}));
  posted(1);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, GrantThenOffer) {
  grant(kD, 100);
  EXPECT_EQ(take(out), Lines{"to 7: ACCEPTED 100"});
  EXPECT_FALSE(producer.may_post(1));  // rule 1: nothing is posted before both are there
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [0,32) last"});
  EXPECT_TRUE(producer.may_post(1));
  posted(1);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, WatermarkRisesInWholeGranules) {
  config.granularity_tokens = 16;
  producer = Producer(config);
  grant(kD, 100, {4, 60});
  take(out);
  offer(1, 15, false);
  EXPECT_EQ(take(out), Lines{});
  offer(1, 40, false);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [4,32)"});
  offer(1, 47, false);
  EXPECT_EQ(take(out), Lines{});
  posted(1);
  EXPECT_EQ(take(out), Lines{});
  offer(1, 60, true);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [32,60) last"});
  posted(1);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, PiecesThatAreTooSmallWaitForMore) {
  config.granularity_tokens = 4;
  config.min_piece_tokens = 12;
  producer = Producer(config);
  grant(kD, 100);
  take(out);
  offer(1, 8, false);
  EXPECT_EQ(take(out), Lines{});
  offer(1, 14, false);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [0,12)"});
  offer(1, 20, false);
  EXPECT_EQ(take(out), Lines{});
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [12,32) last"});
}

TEST_F(ProducerScript, SmallPieceThatEndsAGrantWaitsForNothing) {
  config.granularity_tokens = 4;
  config.min_piece_tokens = 100;
  producer = Producer(config);
  grant(kD, 100);
  take(out);
  offer(1, 40, false);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [0,32) last"});
}

TEST_F(ProducerScript, RewoundOfferIsWrittenAnewInTwoStages) {
  config.granularity_tokens = 4;
  producer = Producer(config);
  grant(kD, 100);
  offer(1, 8, false);
  offer(1, 12, false);
  take(out);
  EXPECT_TRUE(producer.writes_in_flight(1));
  EXPECT_TRUE(producer.rewind(1));
  posted(1);
  EXPECT_TRUE(producer.writes_in_flight(1));
  posted(1);
  EXPECT_FALSE(producer.writes_in_flight(1));
  EXPECT_EQ(take(out), Lines{}) << "what was taken back is not offered";
  offer(1, 8, false);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [0,8)"});
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [8,12)"}) << "the rest waits for what was written before";
  posted(1);
  EXPECT_EQ(take(out), Lines{});
  posted(1);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [12,32) last"});
  posted(1);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, NewBlocksAreNotWrittenBesideOldOnes) {
  config.granularity_tokens = 4;
  producer = Producer(config);
  grant(kD, 100);
  offer(1, 8, false);
  take(out);
  producer.rewind(1);
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{}) << "an old write is in flight";
  posted(1);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [0,8)"});
}

TEST_F(ProducerScript, RewoundAfterItsLastPieceItEndsWithTheWritesUnderWay) {
  grant(kD, 100);
  offer(1, 32, true);
  take(out);
  EXPECT_TRUE(producer.rewind(1));
  posted(1);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  EXPECT_FALSE(producer.rewind(1));
  EXPECT_FALSE(producer.writes_in_flight(1));
  withdraw(1);  // its owner adds nothing more
  EXPECT_EQ(take(out), Lines{});
  expect_at_rest();
}

TEST_F(ProducerScript, RewoundOfferWithoutAGrantStaysOpen) {
  offer(1, 32, true);
  EXPECT_TRUE(producer.rewind(1));
  tick(config.offer_ttl);
  grant(kD, 100);
  EXPECT_EQ(take(out), Lines{"to 7: ACCEPTED 100"});
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [0,32) last"});
}

TEST_F(ProducerScript, WithoutGranularityNothingIsWrittenBeforeFinal) {
  grant(kD, 100);
  take(out);
  offer(1, 32, false);
  EXPECT_EQ(take(out), Lines{});
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [0,32) last"});
}

TEST_F(ProducerScript, PrefillWithFewerTokensThanGrantedIsAFailureNeverAShortPush) {
  grant(kD, 100, {0, 33});
  take(out);
  offer(1, 32, true);
  EXPECT_EQ(take(out), (Lines{"to 7: FAILED 100 producer_short", "offer 1 failed producer_short"}));
  expect_at_rest();
}

TEST_F(ProducerScript, EmptySpanEndsTheOffer) {
  grant(kD, 100, {32, 32});
  EXPECT_EQ(take(out), Lines{"to 7: ACCEPTED 100"});
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, RevokeWithAPostInFlightIsAnsweredWhenThatHasEnded) {
  offer(1, 32, true);
  grant(kD, 100);
  take(out);
  revoke(kD, 100);
  EXPECT_EQ(take(out), Lines{});
  EXPECT_FALSE(producer.may_post(1));
  posted(1);
  EXPECT_EQ(take(out), (Lines{"to 7: REVOKED 100", "offer 1 failed revoked"}));
  expect_at_rest();
}

TEST_F(ProducerScript, RevokeBeforeTheOfferEndsTheOfferWhenItComes) {
  grant(kD, 100);
  revoke(kD, 100);
  EXPECT_EQ(take(out), (Lines{"to 7: ACCEPTED 100", "to 7: REVOKED 100"}));
  offer(1, 16, false);
  EXPECT_EQ(take(out), Lines{"offer 1 failed revoked"});
  offer(1, 32, true);  // what the owner still adds is ignored
  EXPECT_EQ(take(out), Lines{});
  expect_at_rest();
}

TEST_F(ProducerScript, RevokeThatOvertakesItsGrant) {
  offer(1, 32, true);
  revoke(kD, 100);
  grant(kD, 100);
  EXPECT_EQ(take(out), (Lines{"to 7: REVOKED 100", "to 7: REVOKED 100"}));
  EXPECT_EQ(producer.live_serves(), 0U);
}

TEST_F(ProducerScript, RepeatedGrantIsAcceptedAgainAndAnEndedOneIsNotRaised) {
  offer(1, 32, true);
  grant(kD, 100);
  take(out);
  grant(kD, 100);
  EXPECT_EQ(take(out), Lines{"to 7: ACCEPTED 100"});
  posted(1);
  take(out);
  offer(2, 32, true);
  grant(kD, 100);  // replayed
  EXPECT_EQ(take(out), Lines{"to 7: REVOKED 100"});
}

TEST_F(ProducerScript, WithdrawWithAPostInFlightKeepsTheBlocks) {
  offer(1, 32, true);
  grant(kD, 100);
  take(out);
  withdraw(1);
  withdraw(1);
  EXPECT_EQ(take(out), Lines{});  // rule 3
  EXPECT_NE(producer.producer_blocks(1), nullptr);
  posted(1);
  EXPECT_EQ(take(out),
            (Lines{"to 7: FAILED 100 producer_aborted", "offer 1 failed producer_aborted"}));
  expect_at_rest();
}

TEST_F(ProducerScript, NewOfferOfAKeyWhoseOldOneStillWritesWaitsForAnAttemptOfItsOwn) {
  offer(1, 32, true);
  grant(kD, 100);
  take(out);
  withdraw(1);
  offer(2, 32, true);
  EXPECT_EQ(take(out), Lines{});
  posted(1);
  EXPECT_EQ(take(out),
            (Lines{"to 7: FAILED 100 producer_aborted", "offer 1 failed producer_aborted"}));
  grant(kD, 101);
  EXPECT_EQ(take(out), (Lines{"to 7: ACCEPTED 101", "post 2 to 7 [0,32) last"}));
  posted(2);
  EXPECT_EQ(take(out), Lines{"offer 2 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, OfferGivenUpBeforeFinalStaysEnded) {
  offer(1, 16, false);
  OfferCommand wrong;
  wrong.ticket = 1;
  wrong.key = key_of("r");
  wrong.new_blocks = {GroupBlocks{0, {2}}, GroupBlocks{0, {3}}};
  producer.offer(std::move(wrong), now, out);
  EXPECT_EQ(take(out), Lines{"offer 1 failed bad_request"});
  grant(kD, 100, {0, 16});
  take(out);
  offer(1, 32, true);  // with the first block missing: must not be written from
  EXPECT_EQ(take(out), Lines{});
  tick(config.retry_grace);
  EXPECT_EQ(take(out), Lines{"to 7: FAILED 100 bad_request"});
  expect_at_rest();
}

TEST_F(ProducerScript, RefusedChunkEndsTheOfferOnce) {
  grant(kD, 100);
  take(out);
  OfferCommand chunk;
  chunk.ticket = 1;
  chunk.key = key_of("r");
  producer.refuse(chunk, Reason::kTransportError, now, out);
  EXPECT_EQ(take(out),
            (Lines{"to 7: FAILED 100 transport_error", "offer 1 failed transport_error"}));
  chunk.final = true;
  producer.refuse(chunk, Reason::kTransportError, now, out);
  EXPECT_EQ(take(out), Lines{});
  expect_at_rest();
}

TEST_F(ProducerScript, NewerAttemptSupersedesTheOlder) {
  offer(1, 32, true);
  grant(kD, 100);
  take(out);
  grant(kD, 101);
  EXPECT_EQ(take(out), (Lines{"to 7: ACCEPTED 101", "post 2 to 7 [0,32) last"}));
  posted(1);
  EXPECT_EQ(take(out), Lines{"to 7: FAILED 100 superseded"});
  posted(2);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, OfferWaitsForWritesOfASupersededAttempt) {
  offer(1, 32, true);
  grant(kD, 100);
  grant(kD, 101);
  take(out);
  posted(2);
  EXPECT_EQ(take(out), Lines{});  // the first post still reads from its blocks
  posted(1);
  EXPECT_EQ(take(out), (Lines{"to 7: FAILED 100 superseded", "offer 1 done"}));
}

TEST_F(ProducerScript, LateRankOfAnOlderAttemptDoesNotSupersedeTheNewer) {
  offer(1, 32, true);
  grant(kD, 100, {0, 32}, 2);
  grant(kD, 101, {0, 32}, 2);
  take(out);
  grant(kD2, 100, {0, 32}, 2);
  EXPECT_EQ(take(out), Lines{"to 8: FAILED 100 superseded"});
  EXPECT_TRUE(producer.may_post(2));
}

TEST_F(ProducerScript, OfferServesEachRankOfTheConsumer) {
  offer(1, 32, true);
  grant(kD, 100, {0, 32}, 2);
  take(out);
  posted(1);
  EXPECT_EQ(take(out), Lines{});
  grant(kD2, 100, {0, 32}, 2);
  EXPECT_EQ(take(out), (Lines{"to 8: ACCEPTED 100", "post 2 to 8 [0,32) last"}));
  posted(2);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, OneRankRevokesAndTheOtherIsServed) {
  grant(kD, 100, {0, 32}, 2);
  grant(kD2, 100, {0, 32}, 2);
  revoke(kD, 100);
  take(out);
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"post 2 to 8 [0,32) last"});
  posted(2);
  EXPECT_EQ(take(out), Lines{"offer 1 failed revoked"});
  expect_at_rest();
}

TEST_F(ProducerScript, AnotherEngineWithTheSameKeyIsRefused) {
  grant(kD, 100);
  take(out);
  grant(kE, 200);
  EXPECT_EQ(take(out), Lines{"to 9: FAILED 200 ambiguous"});
  offer(1, 32, true);
  EXPECT_EQ(take(out), Lines{"post 1 to 7 [0,32) last"});
}

TEST_F(ProducerScript, AnotherEngineCannotJoinAnAttempt) {
  grant(kD, 100, {0, 32}, 2);
  take(out);
  grant(kE, 100, {0, 32}, 2);
  EXPECT_EQ(take(out), Lines{"to 9: FAILED 100 ambiguous"});
}

TEST_F(ProducerScript, SecondOfferOfALiveKeyIsRefusedAndHarmsNothing) {
  offer(1, 32, true);
  grant(kD, 100);
  take(out);
  offer(2, 32, true);
  EXPECT_EQ(take(out), Lines{"offer 2 failed ambiguous"});
  withdraw(2);
  producer.fail_key(key_of("r"), Reason::kProducerAborted, now, out);  // it speaks of offer 2
  EXPECT_EQ(take(out), Lines{});
  EXPECT_TRUE(producer.may_post(1));
  posted(1);
  EXPECT_EQ(take(out), Lines{"offer 1 done"});
  expect_at_rest();
}

TEST_F(ProducerScript, PrefillGivenUpFailsWaitingGrantsNowAndLaterOnesSoon) {
  grant(kD, 100, {0, 32}, 2);
  take(out);
  producer.fail_key(key_of("r"), Reason::kProducerAborted, now, out);
  EXPECT_EQ(take(out), Lines{"to 7: FAILED 100 producer_aborted"});
  grant(kD2, 100, {0, 32}, 2);  // its sibling comes late
  EXPECT_EQ(take(out), Lines{"to 8: FAILED 100 producer_aborted"});
  grant(kD, 101);  // a retry may have a prefill of its own
  EXPECT_EQ(take(out), Lines{"to 7: ACCEPTED 101"});
  tick(config.retry_grace);
  EXPECT_EQ(take(out), Lines{"to 7: FAILED 101 producer_aborted"});
  expect_at_rest();
}

TEST_F(ProducerScript, RetryAfterAGivenUpPrefillIsServed) {
  producer.fail_key(key_of("r"), Reason::kProducerAborted, now, out);
  grant(kD, 101);
  offer(2, 32, true);
  EXPECT_EQ(take(out), (Lines{"to 7: ACCEPTED 101", "post 1 to 7 [0,32) last"}));
  posted(1);
  EXPECT_EQ(take(out), Lines{"offer 2 done"});
}

TEST_F(ProducerScript, FailedPostWaitsForItsSiblings) {
  config.granularity_tokens = 16;
  producer = Producer(config);
  grant(kD, 100);
  offer(1, 16, false);
  offer(1, 32, true);
  EXPECT_EQ(take(out),
            (Lines{"to 7: ACCEPTED 100", "post 1 to 7 [0,16)", "post 1 to 7 [16,32) last"}));
  posted(1, Reason::kTransportError);
  EXPECT_EQ(take(out), Lines{});
  posted(1);
  EXPECT_EQ(take(out),
            (Lines{"to 7: FAILED 100 transport_error", "offer 1 failed transport_error"}));
  expect_at_rest();
}

TEST_F(ProducerScript, LostConsumerIsToldNothingAndBlocksWaitForThePosts) {
  offer(1, 32, true);
  grant(kD, 100);
  take(out);
  producer.on_peer_lost(kD, now, now, out);
  EXPECT_EQ(take(out), Lines{});
  posted(1, Reason::kTransportError);
  EXPECT_EQ(take(out), Lines{"offer 1 failed peer_lost"});
  expect_at_rest();
}

TEST_F(ProducerScript, GrantWithoutPrefillExpires) {
  grant(kD, 100);
  take(out);
  tick(config.grant_ttl - 1);
  EXPECT_EQ(take(out), Lines{});
  tick(1);
  EXPECT_EQ(take(out), Lines{"to 7: FAILED 100 grant_expired"});
  expect_at_rest();
}

TEST_F(ProducerScript, FinalOfferWithoutConsumerExpiresAndAnOpenOneDoesNot) {
  offer(1, 32, true);
  offer(2, 16, false, "s");
  tick(config.offer_ttl);
  EXPECT_EQ(take(out), Lines{"offer 1 failed offer_expired"});
  grant(kD, 100, {0, 16}, 1, "s");
  offer(2, 16, true, "s");
  EXPECT_EQ(take(out), (Lines{"to 7: ACCEPTED 100", "post 1 to 7 [0,16) last"}));
}

TEST_F(ProducerScript, TablesAreBounded) {
  config.max_serves = 1;
  config.max_offers = 1;
  config.max_granted_blocks = 3;
  producer = Producer(config);
  grant(kD, 100);
  take(out);
  grant(kD, 101, {0, 32}, 1, "s");
  EXPECT_EQ(take(out), Lines{"to 7: FAILED 101 table_full"});
  offer(1, 16, false);
  offer(2, 16, false, "t");
  EXPECT_EQ(take(out), Lines{"offer 2 failed table_full"});
  revoke(kD, 100);
  take(out);
  config.max_serves = 9;
  producer = Producer(config);
  grant(kD, 100);
  take(out);
  grant(kD, 101, {0, 32}, 1, "s");  // two blocks each
  EXPECT_EQ(take(out), Lines{"to 7: FAILED 101 table_full"});
}

TEST_F(ProducerScript, WithdrawAllEndsEverything) {
  offer(1, 32, false);
  grant(kD, 100, {0, 32}, 1, "s");
  take(out);
  producer.withdraw_all(Reason::kShutdown, now, out);
  EXPECT_EQ(take(out), (Lines{"offer 1 failed shutdown", "to 7: FAILED 100 shutdown"}));
  offer(1, 64, true);
  EXPECT_EQ(take(out), Lines{});
  EXPECT_EQ(producer.live_offers(), 0U);
}

TEST_F(ProducerScript, ManyLiveRequestsAreNotLookedAtInVain) {
  // 10,000 live grants and a tick every 5 ms for a minute: a scan of each in each tick would take
  // many seconds under a sanitizer.
  for (Attempt attempt = 1; attempt <= 10'000; ++attempt) {
    grant(kD, attempt, {0, 32}, 1, "r" + std::to_string(attempt));
  }
  take(out);
  for (int i = 0; i < 12'000; ++i) {
    tick(5 * kMillisecond);
  }
  EXPECT_EQ(producer.live_serves(), 10'000U);
  tick(config.grant_ttl);
  EXPECT_EQ(producer.live_serves(), 0U);
}

}  // namespace
}  // namespace kvpush
