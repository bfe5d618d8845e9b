// The consumer's state machine, as scripts: what goes in, then what comes out.
#include "consumer.h"

#include <gtest/gtest.h>

#include "support/machines.h"

namespace kvpush {
namespace {

using script::key_of;
using script::Lines;
using script::take;

constexpr Session kP = 7;
constexpr Session kQ = 8;

class ConsumerScript : public script::ConsumerMachine {
 protected:
  bool written(Session from, Attempt attempt, TokenSpan span, std::uint32_t part = 0,
               std::uint32_t parts = 1) {
    return consumer.on_written(from, {attempt, span, part, parts}, now, out);
  }
  bool accepted(Session from, Attempt attempt) {
    return consumer.on_accepted(from, {attempt}, now, out);
  }
};

TEST_F(ConsumerScript, GrantIsSentToEachWriterAndIsDoneWhenEachHasCoveredIt) {
  grant(1, 100, {kP, kQ});
  EXPECT_EQ(take(out), (Lines{"to 7: GRANT 100 [0,32)", "to 8: GRANT 100 [0,32)"}));
  EXPECT_TRUE(accepted(kP, 100));
  EXPECT_TRUE(written(kP, 100, {0, 32}));
  EXPECT_EQ(take(out), Lines{});
  EXPECT_TRUE(written(kQ, 100, {16, 32}));  // ACCEPTED may come late, or never
  EXPECT_EQ(take(out), Lines{});
  EXPECT_TRUE(written(kQ, 100, {0, 16}));
  EXPECT_EQ(take(out), Lines{"grant 1 done"});
  EXPECT_EQ(consumer.live(), 0U);
}

TEST_F(ConsumerScript, TheSameWrittenTwiceFromOneWriterDoesNotStandForTheOther) {
  grant(1, 100, {kP, kQ});
  EXPECT_TRUE(written(kP, 100, {0, 32}));
  EXPECT_TRUE(written(kP, 100, {0, 32}));
  take(out);
  EXPECT_EQ(consumer.live(), 1U);
}

TEST_F(ConsumerScript, LastPartBeforeTheFirstIsNotTheEnd) {
  grant(1, 100, {kP});
  take(out);
  EXPECT_TRUE(written(kP, 100, {0, 32}, 2, 3));
  EXPECT_TRUE(written(kP, 100, {0, 32}, 2, 3));
  EXPECT_TRUE(written(kP, 100, {0, 32}, 0, 3));
  EXPECT_EQ(take(out), Lines{});
  EXPECT_TRUE(written(kP, 100, {0, 32}, 1, 3));
  EXPECT_EQ(take(out), Lines{"grant 1 done"});
}

TEST_F(ConsumerScript, WithoutWritersNothingIsNeeded) {
  grant(1, 100, {});
  EXPECT_EQ(take(out), Lines{"grant 1 done"});
}

TEST_F(ConsumerScript, EmptySpanIsDoneWhenItIsAccepted) {
  grant(1, 100, {kP}, {32, 32});
  EXPECT_EQ(take(out), Lines{"to 7: GRANT 100 [32,32)"});
  EXPECT_TRUE(accepted(kP, 100));
  EXPECT_EQ(take(out), Lines{"grant 1 done"});
}

TEST_F(ConsumerScript, RevokeGivesBlocksBackOnlyWhenEveryWriterHasAnswered) {
  grant(1, 100, {kP, kQ});
  take(out);
  revoke(1);
  revoke(1);  // twice is once
  EXPECT_EQ(take(out), (Lines{"to 7: REVOKE 100", "to 8: REVOKE 100"}));
  EXPECT_TRUE(revoked(kP, 100));
  EXPECT_EQ(take(out), Lines{});
  EXPECT_TRUE(revoked(kQ, 100));
  EXPECT_EQ(take(out), Lines{"grant 1 revoked revoked"});
  revoke(1);  // after the end
  EXPECT_FALSE(revoked(kQ, 100));
  EXPECT_EQ(take(out), Lines{});
}

TEST_F(ConsumerScript, CompletionThatRacesARevokeAlsoEndsTheWriting) {
  grant(1, 100, {kP});
  revoke(1);
  take(out);
  EXPECT_TRUE(written(kP, 100, {0, 32}));
  EXPECT_EQ(take(out), Lines{"grant 1 revoked revoked"});
}

TEST_F(ConsumerScript, AWriterThatIsCompleteNeedsNoRevoke) {
  grant(1, 100, {kP, kQ});
  written(kP, 100, {0, 32});
  take(out);
  revoke(1);
  EXPECT_EQ(take(out), Lines{"to 8: REVOKE 100"});
}

TEST_F(ConsumerScript, OneWriterFailsAndTheOthersAreWaitedFor) {
  grant(1, 100, {kP, kQ});
  take(out);
  EXPECT_TRUE(failed(kP, 100));
  EXPECT_EQ(take(out), Lines{"to 8: REVOKE 100"});
  EXPECT_TRUE(failed(kQ, 100, Reason::kTransportError));  // the first reason stands
  EXPECT_EQ(take(out), Lines{"grant 1 failed producer_aborted"});
}

TEST_F(ConsumerScript, DeadlinePassesAndBlocksWaitForTheAnswer) {
  grant(1, 100, {kP}, {0, 32}, now + 3 * kSecond);
  accepted(kP, 100);
  take(out);
  tick(3 * kSecond - 1);
  EXPECT_EQ(take(out), Lines{});
  tick(1);
  EXPECT_EQ(take(out), Lines{"to 7: REVOKE 100"});
  revoked(kP, 100);
  EXPECT_EQ(take(out), Lines{"grant 1 failed deadline"});
}

TEST_F(ConsumerScript, LostWriterIsFencedBeforeBlocksGoBack) {
  grant(1, 100, {kP});
  take(out);
  lose(kP, 12 * kSecond);
  tick(12 * kSecond - 1);
  EXPECT_EQ(take(out), Lines{});
  tick(1);
  EXPECT_EQ(take(out), Lines{"grant 1 failed peer_lost"});
}

TEST_F(ConsumerScript, WriterThatSaidGoodbyeNeedsNoFence) {
  grant(1, 100, {kP});
  take(out);
  lose(kP, 0);
  EXPECT_EQ(take(out), Lines{"grant 1 failed peer_lost"});
}

TEST_F(ConsumerScript, LossOfAWriterThatHasWrittenAllIsNoFailure) {
  grant(1, 100, {kP, kQ});
  written(kP, 100, {0, 32});
  take(out);
  lose(kP, kSecond);
  EXPECT_EQ(take(out), Lines{});
  written(kQ, 100, {0, 32});
  EXPECT_EQ(take(out), Lines{"grant 1 done"});
}

TEST_F(ConsumerScript, UnansweredGrantIsRepeatedUntilItIsAccepted) {
  grant(1, 100, {kP});
  take(out);
  tick(2 * kSecond);
  EXPECT_EQ(take(out), Lines{"to 7: GRANT 100 [0,32)"});
  accepted(kP, 100);
  tick(10 * kSecond);
  EXPECT_EQ(take(out), Lines{});
}

TEST_F(ConsumerScript, UnansweredRevokeIsRepeatedThenThePeerIsDropped) {
  grant(1, 100, {kP});
  take(out);
  revoke(1);
  take(out);
  int repeats = 0;
  for (int i = 0; i < 19; ++i) {
    tick(kSecond);
    repeats += static_cast<int>(take(out).size());
  }
  EXPECT_EQ(repeats, 9);
  tick(kSecond);
  EXPECT_EQ(take(out), Lines{"drop 7"});
}

TEST_F(ConsumerScript, UnaskedRevokedSaysThatTheProducerKnowsNothing) {
  grant(1, 100, {kP});
  take(out);
  EXPECT_TRUE(revoked(kP, 100));
  EXPECT_EQ(take(out), Lines{"grant 1 failed peer_lost"});
}

TEST_F(ConsumerScript, MessagesThatFitNothingHaveNoEffect) {
  grant(1, 100, {kP});
  take(out);
  EXPECT_FALSE(accepted(kQ, 100));  // not a writer of it
  EXPECT_FALSE(accepted(kP, 101));  // no such attempt
  EXPECT_FALSE(written(kQ, 100, {0, 32}));
  EXPECT_FALSE(written(kP, 100, {0, 33}));  // outside of the grant
  EXPECT_TRUE(written(kP, 100, {0, 32}, 0, 2));
  EXPECT_FALSE(written(kP, 100, {0, 32}, 1, 3));  // contradicts itself
  EXPECT_FALSE(failed(kQ, 100));
  EXPECT_EQ(take(out), Lines{});
  EXPECT_EQ(consumer.live(), 1U);
}

TEST_F(ConsumerScript, WhatNoGrantCanCarryFailsAtOnce) {
  grant(1, 100, {kP, kP});
  EXPECT_EQ(take(out), Lines{"grant 1 failed bad_request"});
  GrantCommand command;
  command.ticket = 2;
  command.attempt = 5;
  command.key = key_of(std::string(kMaxTransferIdBytes + 1, 'x'));
  command.writers = {kP};
  consumer.grant(std::move(command), now, out);
  EXPECT_EQ(take(out), Lines{"grant 2 failed bad_request"});
  grant(3, 100, {kP});
  take(out);
  grant(4, 100, {kP});  // the attempt is in use
  EXPECT_EQ(take(out), Lines{"grant 4 failed bad_request"});
}

TEST_F(ConsumerScript, TableIsBounded) {
  ConsumerConfig config;
  config.max_grants = 1;
  consumer = Consumer(config);
  grant(1, 100, {kP});
  take(out);
  grant(2, 101, {kP});
  EXPECT_EQ(take(out), Lines{"grant 2 failed table_full"});
}

TEST_F(ConsumerScript, RevokeAllEndsEverything) {
  grant(1, 100, {kP});
  grant(2, 101, {kP});
  take(out);
  consumer.revoke_all(Reason::kShutdown, now, out);
  EXPECT_EQ(take(out).size(), 2U);
  revoked(kP, 100);
  revoked(kP, 101);
  EXPECT_EQ(take(out), (Lines{"grant 1 revoked shutdown", "grant 2 revoked shutdown"}));
}

}  // namespace
}  // namespace kvpush
