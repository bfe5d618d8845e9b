// Engines with each other, over a fabric without faults: what the parts make together.
#include "engine.h"

#include <algorithm>
#include <utility>

#include <gtest/gtest.h>

#include "support/script.h"
#include "support/world.h"

namespace kvpush {
namespace {

using script::key_of;

class EngineTest : public EngineWorld {
 protected:
  TestRank& p = add("P", 10);
  TestRank& d = add("D", 20);

  // Two more, over another fabric.
  std::pair<TestRank&, TestRank&> add_two(sim::SimFabric& other) {
    ranks.push_back(std::make_unique<TestRank>(queue, other, "A", 50));
    ranks.push_back(std::make_unique<TestRank>(queue, other, "B", 60));
    return {*ranks[ranks.size() - 2], *ranks.back()};
  }

  // One block on its way over that fabric, from the first to the second.
  void begin_transfer(TestRank& a, TestRank& b, DurationNs wait = 60 * kSecond) {
    meet(b, a);
    a.offer(6, key_of("r"), {1});
    b.grant(5, 100, key_of("r"), {4}, {50}, wait);
  }
};

TEST_F(EngineTest, KvGoesFromOfferToGrant) {
  expect_kv_goes_from_offer_to_grant(d, p);
}

// How closely an engine watches for messages: a grant whose offer has still to be computed can't be
// served any sooner by looking more often, an offer whose grant is on the way can.
TEST_F(EngineTest, OnlyWhatWaitsForAPeerIsWatchedClosely) {
  meet(d, p);
  pass(10 * kMillisecond);
  EXPECT_EQ(p.engine->tick(), Activity::kIdle);
  EXPECT_EQ(d.engine->tick(), Activity::kIdle);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  EXPECT_EQ(p.engine->counters().served_live, 1U);
  EXPECT_EQ(p.engine->tick(), Activity::kIdle);
  EXPECT_EQ(d.engine->tick(), Activity::kWaiting);
  p.offer(6, key_of("other"), {1});
  pass(10 * kMillisecond);
  EXPECT_EQ(p.engine->tick(), Activity::kWaiting);
}

TEST_F(EngineTest, RewoundOfferDeliversTheNewBytes) {
  meet(d, p);
  p.fill_block(1, 10);
  d.grant(5, 100, key_of("r"), {4, 3}, {10});
  pass(10 * kMillisecond);
  p.offer(6, key_of("r"), {1}, false);
  pass(10 * kMillisecond);
  p.engine->handle(RewindCommand{9, {6, 77}});
  pass(10 * kMillisecond);
  const auto results = p.take<RewindResult>();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].id, 9U);
  EXPECT_EQ(results[0].rewound, std::vector<Ticket>{6});
  p.fill_block(1, 99);  // another request's
  p.fill_block(5, 30);
  p.fill_block(6, 40);
  p.offer(6, key_of("r"), {5, 6});
  pass(10 * kMillisecond);
  expect_end(d, 5, End::kDone);
  expect_end(p, 6, End::kDone);
  EXPECT_TRUE(d.block_is(4, 30));
  EXPECT_TRUE(d.block_is(3, 40));
  expect_at_rest(p);
}

// An accelerator that has not finished yet.
class ClosedFence final : public DeviceFence {
 public:
  Result<bool> is_complete(DeviceEvent) override { return open; }
  bool open = false;
};

TEST_F(EngineTest, EventsAreTheirOwnersAgainWhenNothingWaitsForThem) {
  ClosedFence fence;
  Engine engine(*p.transport, p.clock, fence, {}, p.info);
  for (Ticket ticket = 1; ticket <= 3; ++ticket) {
    FencedOfferCommand command;
    command.offer = {ticket, key_of("r" + std::to_string(ticket)), {GroupBlocks{0, {1}}}, 4, true};
    command.event = 1000 + ticket;
    command.fence = ticket;
    engine.handle(std::move(command));
  }
  engine.tick();
  EXPECT_EQ(engine.counters().fences_waiting, 3U);
  EXPECT_EQ(engine.fences_passed(), 0U);
  engine.handle(RewindCommand{1, {1}});
  EXPECT_EQ(engine.fences_passed(), 1U) << "what was taken back waits for nothing";
  std::vector<EngineEvent> events;
  engine.take_events(events);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(std::get<RewindResult>(events[0]).rewound, std::vector<Ticket>{1})
      << "it can be offered anew";
  fence.open = true;
  engine.tick();
  EXPECT_EQ(engine.fences_passed(), 3U);
  EXPECT_EQ(engine.counters().offers_live, 3U);
}

TEST_F(EngineTest, RoundsThatFollowEachOtherReuseThePeer) {
  meet(d, p);
  for (Ticket round = 1; round <= 20; ++round) {
    const TransferKey key = key_of("r" + std::to_string(round));
    p.offer(round, key, {1});
    d.grant(round, round, key, {2}, {10});
    pass(10 * kMillisecond);
    expect_end(d, round, End::kDone);
    expect_end(p, round, End::kDone);
  }
  EXPECT_EQ(p.engine->counters().peers, 1U);
}

TEST_F(EngineTest, PeersThatDifferAreRefusedByName) {
  TestRank& other = add("other", 30, {}, "another-model");
  ConnectCommand command;  // as if the side channel had not compared
  command.id = 3;
  command.targets = {{p.info, {{0, 0, 0, 4}}, 1}};
  command.deadline = queue.now() + 10 * kSecond;
  other.engine->handle(std::move(command));
  pass(10 * kMillisecond);
  const auto results = other.take<ConnectResult>();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].status.reason(), Reason::kIncompatible);
  EXPECT_NE(results[0].status.message().find("another-model"), std::string::npos)
      << results[0].status.message();
}

// What a stranger can do who has the producer's metadata but not its session, which discovery alone
// tells: nothing. His own metadata must not even reach the transport, which trusts it.
TEST_F(EngineTest, HelloThatNamesAnotherSessionIsDroppedUnread) {
  ASSERT_TRUE(d.transport->add_peer(p.info.transport_metadata).is_ok());
  HelloMessage hello;
  hello.to = p.info.session + 1;
  hello.peer_info = encode_peer_info(d.info);
  hello.pairs = {{0, 0, 0, 4}, {1, 1, 0, 4}};
  Message message{d.info.session, hello};
  message.meeting = 1;
  ASSERT_TRUE(d.transport->notify("P", encode_message(message)).is_ok());
  Message grant{d.info.session, GrantMessage{100, key_of("r"), {0, 4}, {GroupBlocks{0, {4}}}}};
  grant.meeting = 1;
  ASSERT_TRUE(d.transport->notify("P", encode_message(grant)).is_ok());
  p.offer(6, key_of("r"), {1});
  pass(kSecond);
  const EngineCounters counters = p.engine->counters();
  EXPECT_EQ(counters.messages_received, 2U);
  EXPECT_EQ(counters.messages_dropped, 2U);
  EXPECT_EQ(counters.peers + counters.served_live, 0U);
  EXPECT_EQ(p.transport->counts().peers, 0U);
  EXPECT_EQ(counters.offers_live, 1U);
}

TEST_F(EngineTest, ConnectToNobodyTimesOutAndOthersAreNotDelayed) {
  TestRank& dead = add("dead", 40);
  d.connect(7, {dead.info}, 3 * kSecond);
  d.connect(8, {p.info});
  pass(10 * kMillisecond, &dead);
  auto results = d.take<ConnectResult>();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].id, 8U);
  EXPECT_TRUE(results[0].status.is_ok());
  pass(3 * kSecond, &dead);
  results = d.take<ConnectResult>();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].status.reason(), Reason::kPeerUnreachable);
}

// One that has tried at once to meet another, over a fabric of their own.
struct FaultyMeeting {
  FaultyMeeting(sim::EventQueue& queue, const sim::FabricFaults& faults)
      : fabric(queue, sim::Random(2), faults),
        a(queue, fabric, "a", 50),
        b(queue, fabric, "b", 60) {
    a.connect(9, {b.info});
    a.tick();
  }
  sim::SimFabric fabric;
  TestRank a;
  TestRank b;
};

TEST_F(EngineTest, PeerThatTheTransportCannotLoadIsUnreachable) {
  sim::FabricFaults faults;
  faults.unloadable_per_mille = 1'000;
  FaultyMeeting meeting(queue, faults);
  EXPECT_EQ(meeting.a.take<ConnectResult>().at(0).status.reason(), Reason::kPeerUnreachable);
}

TEST_F(EngineTest, OnePeerTooManyIsSaidSo) {
  EngineConfig config;
  config.max_peers = 1;
  TestRank a(queue, fabric, "a", 50, config);
  a.connect(8, {p.info});
  a.connect(9, {d.info});
  a.tick();
  EXPECT_EQ(a.take<ConnectResult>().at(0).status.reason(), Reason::kTableFull);
}

TEST_F(EngineTest, ConnectWhoseHelloCannotBeSentFailsAtOnce) {
  sim::FabricFaults faults;
  faults.invalidate_per_mille = 1'000;
  FaultyMeeting meeting(queue, faults);
  const auto results = meeting.a.take<ConnectResult>();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].status.reason(), Reason::kPeerLost);
  EXPECT_FALSE(results[0].status.is_ok());
  EXPECT_EQ(meeting.a.transport->counts().peers, 0U);
}

TEST_F(EngineTest, GrantThatCannotBeSentIsNoSilentWait) {
  meet(d, p);
  d.transport->remove_peer("P");  // as a transport that has noticed a disconnect
  d.grant(5, 100, key_of("r"), {4}, {10});
  d.tick();
  EXPECT_EQ(d.take<PeerLostEvent>().size(), 1U);
  EXPECT_TRUE(d.take<EndAction>().empty());  // it may still write
  pass(13 * kSecond);
  expect_end(d, 5, End::kFailed, Reason::kPeerLost);
  expect_at_rest(d);
}

TEST_F(EngineTest, PeersThatAreIdleForLongAreKept) {
  meet(d, p);
  pass(5 * 60 * kSecond);
  EXPECT_TRUE(d.take<PeerLostEvent>().empty());
  EXPECT_TRUE(p.take<PeerLostEvent>().empty());
  p.offer(6, key_of("r"), {1});
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  expect_end(d, 5, End::kDone);
}

TEST_F(EngineTest, HandleThatNeverEndsFailsBothSidesAndKeepsTheBlocksUntilItCanDoNoHarm) {
  sim::FabricFaults faults = lenient();
  faults.stuck_per_mille = 1'000;
  sim::SimFabric stuck(queue, sim::Random(2), faults);
  auto [a, b] = add_two(stuck);
  begin_transfer(a, b, 5 * kSecond);
  pass(24 * kSecond);  // the deadline is over, REVOKE remains unanswered
  EXPECT_EQ(a.engine->counters().handles_in_flight, 1U);
  EXPECT_TRUE(a.take<EndAction>().empty());
  EXPECT_TRUE(b.take<EndAction>().empty());
  pass(2 * kSecond);  // B breaks the connection, and waits for its fence
  EXPECT_EQ(b.take<PeerLostEvent>().size(), 1U);
  EXPECT_TRUE(b.take<EndAction>().empty());
  pass(30 * kSecond);
  expect_end(b, 5, End::kFailed, Reason::kDeadline);
  const auto ends = a.take<EndAction>();
  EXPECT_EQ(ends.size(), 1U);
  EXPECT_TRUE(std::all_of(ends.begin(), ends.end(),
                          [](const EndAction& end) { return end.end == End::kFailed; }));
  expect_at_rest(a);
  expect_at_rest(b);
  ranks.resize(2);  // before their fabric
}

TEST_F(EngineTest, HandleThatFailsFailsBothSidesAtOnce) {
  sim::FabricFaults faults = lenient();
  faults.write_error_per_mille = 1'000;
  sim::SimFabric failing(queue, sim::Random(2), faults);
  auto [a, b] = add_two(failing);
  begin_transfer(a, b);
  pass(kSecond);
  expect_end(b, 5, End::kFailed, Reason::kTransportError);
  expect_end(a, 6, End::kFailed, Reason::kTransportError);
  ranks.resize(2);  // before their fabric
}

TEST_F(EngineTest, NotDrainedWhileAHandleIsInFlight) {
  sim::FabricFaults faults = lenient();
  faults.stuck_per_mille = 1'000;
  sim::SimFabric stuck(queue, sim::Random(2), faults);
  auto [a, b] = add_two(stuck);
  begin_transfer(a, b);
  pass(10 * kMillisecond);
  EXPECT_EQ(a.engine->counters().handles_in_flight, 1U);
  a.engine->handle(ShutdownCommand{});
  pass(kSecond);
  EXPECT_FALSE(a.engine->drained());  // else it would promise that it writes no more
  EXPECT_TRUE(a.take<EndAction>().empty());
  pass(60 * kSecond, &b);  // B is lost, and with it the handle
  EXPECT_TRUE(a.engine->drained());
  ranks.resize(2);  // before their fabric
}

TEST_F(EngineTest, GrantToAStrangerFailsAtOnce) {
  d.grant(5, 100, key_of("r"), {4}, {10});
  d.tick();
  expect_end(d, 5, End::kFailed, Reason::kPeerLost);
}

TEST_F(EngineTest, ProducerThatStopsIsFencedBeforeBlocksGoBack) {
  meet(d, p);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(5 * kSecond);  // keepalives keep it
  EXPECT_TRUE(d.take<PeerLostEvent>().empty());
  pass(9 * kSecond, &p);
  EXPECT_TRUE(d.take<PeerLostEvent>().empty());
  pass(2 * kSecond, &p);
  EXPECT_EQ(d.take<PeerLostEvent>().size(), 1U);
  pass(10 * kSecond, &p);
  EXPECT_TRUE(d.take<EndAction>().empty());  // it may still write
  pass(3 * kSecond, &p);
  expect_end(d, 5, End::kFailed, Reason::kPeerLost);
}

TEST_F(EngineTest, ProducerThatWasStoppedDoesNotTrustWhatLayUnread) {
  meet(d, p);
  pass(kSecond);
  p.offer(6, key_of("r"), {1});
  d.fill_block(4, 50);
  d.grant(5, 100, key_of("r"), {4}, {10}, 60 * kSecond);
  pass(30 * kSecond, &p);  // the GRANT lies unread; D gives P up, and says no more to it
  expect_end(d, 5, End::kFailed, Reason::kPeerLost);
  pass(30 * kSecond);
  EXPECT_TRUE(d.block_is(4, 50));
  EXPECT_EQ(p.engine->counters().writes_posted, 0U);
  expect_at_rest(d);
}

TEST_F(EngineTest, EchoOfAnotherMeetingProvesNothing) {
  meet(d, p);
  for (int i = 0; i < 15; ++i) {  // D says nothing; what comes under its name is of no meeting here
    Message keepalive{20, KeepaliveMessage{}};
    keepalive.meeting = 9;
    keepalive.echo = static_cast<std::uint64_t>(p.clock.now());
    ASSERT_TRUE(d.transport->notify("P", encode_message(keepalive)).is_ok());
    pass(kSecond, &d);
  }
  Message grant{20, GrantMessage{100, key_of("r"), {0, 4}, {GroupBlocks{0, {4}}}}};
  grant.meeting = 1;
  ASSERT_TRUE(d.transport->notify("P", encode_message(grant)).is_ok());
  p.offer(6, key_of("r"), {1});
  pass(10 * kMillisecond, &d);
  EXPECT_EQ(p.engine->counters().writes_posted, 0U);
  expect_end(p, 6, End::kFailed, Reason::kPeerLost);
}

TEST_F(EngineTest, GrantOfAnotherMeetingIsNotServed) {
  meet(d, p);
  p.offer(6, key_of("r"), {1});
  Message grant{20, GrantMessage{100, key_of("r"), {0, 4}, {GroupBlocks{0, {4}}}}};
  for (const std::uint64_t meeting : {0U, 2U}) {
    grant.meeting = meeting;
    ASSERT_TRUE(d.transport->notify("P", encode_message(grant)).is_ok());
    pass(10 * kMillisecond);
    EXPECT_EQ(p.engine->counters().served_live, 0U);
    EXPECT_EQ(p.engine->counters().offers_live, 1U);  // it has met no grant
  }
  EXPECT_TRUE(d.take<PeerLostEvent>().empty());  // D's own meeting goes on
}

TEST_F(EngineTest, PeersMeetAgainAfterAStop) {
  meet(d, p);
  pass(30 * kSecond, &p);
  pass(kSecond);
  meet(d, p);
  p.fill_block(1, 10);
  p.offer(6, key_of("r"), {1});
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  expect_end(d, 5, End::kDone);
  EXPECT_TRUE(d.block_is(4, 10));
}

TEST_F(EngineTest, MeetingAnewEndsWhatTheOldMeetingHadBegun) {
  meet(d, p);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  EXPECT_EQ(p.engine->counters().served_live, 1U);
  // D, in a new life of its engine's peer table, knows P no more: a HELLO with a higher count.
  Message again{20, HelloMessage{10, encode_peer_info(d.info), {{0, 0, 0, 4}}, 1}};
  again.meeting = 9;
  ASSERT_TRUE(d.transport->notify("P", encode_message(again)).is_ok());
  pass(10 * kMillisecond);
  EXPECT_EQ(p.engine->counters().served_live, 0U);
  EXPECT_EQ(p.take<PeerLostEvent>().size(), 1U);
}

TEST_F(EngineTest, GrantOfAMeetingThatIsOverIsRefusedAndThePeersMeetAgain) {
  meet(d, p);
  // P loses D alone: by a GOODBYE that D did not mean.
  ASSERT_TRUE(d.transport->notify("P", encode_message(Message{20, GoodbyeMessage{}})).is_ok());
  pass(10 * kMillisecond);
  EXPECT_EQ(p.engine->counters().peers, 0U);
  p.connect(1, {d.info});  // now D is P's producer, but P is not D's any more
  pass(10 * kMillisecond);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(20 * kMillisecond);
  EXPECT_EQ(d.take<PeerLostEvent>().size(), 1U);
}

// A HELLO and a GRANT that were long on the way: the producer has lost the consumer, and forgotten
// what was revoked.
TEST_F(EngineTest, AMeetingThatTheProducerHasEndedDoesNotGoOn) {
  Message hello{20, HelloMessage{10, encode_peer_info(d.info), {{0, 0, 0, 4}}, 1}};
  hello.meeting = 1;
  Message grant{20, GrantMessage{}};
  grant.meeting = 1;
  std::get<GrantMessage>(grant.body).attempt = 100;
  const Message goodbye{20, GoodbyeMessage{}};
  const auto say = [this](const Message& message) {
    ASSERT_TRUE(d.transport->notify("P", encode_message(message)).is_ok());
    pass(10 * kMillisecond);
  };
  ASSERT_TRUE(d.transport->add_peer(p.info.transport_metadata).is_ok());
  say(hello);
  say(goodbye);
  EXPECT_EQ(p.engine->counters().peers, 0U);
  say(hello);  // nothing shows that D knows of the meeting: WELCOME may have been lost
  EXPECT_EQ(p.engine->counters().peers, 1U);
  say(grant);
  say(goodbye);
  say(hello);
  EXPECT_EQ(p.engine->counters().peers, 0U) << "D has used this meeting";
  say(grant);
  EXPECT_EQ(p.engine->counters().served_live, 0U);
  hello.meeting = 3;
  say(hello);
  EXPECT_EQ(p.engine->counters().peers, 1U);
  say(goodbye);
  hello.meeting = 2;
  say(hello);
  EXPECT_EQ(p.engine->counters().peers, 0U) << "older than the one that was lost";
  hello.meeting = 3;
  say(hello);
  EXPECT_EQ(p.engine->counters().peers, 1U);
}

TEST_F(EngineTest, GoodbyeNeedsNoFence) {
  meet(d, p);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  p.engine->handle(ShutdownCommand{});
  pass(10 * kMillisecond);
  EXPECT_TRUE(p.engine->drained());
  expect_end(d, 5, End::kFailed, Reason::kShutdown);
  p.engine->say_goodbye();
  pass(10 * kMillisecond);
  EXPECT_EQ(d.take<PeerLostEvent>().size(), 1U);
}

TEST_F(EngineTest, ShutdownRefusesWhatComesLaterAndReportsEachEndOnce) {
  meet(d, p);
  FencedOfferCommand chunk;
  chunk.offer.ticket = 6;
  chunk.offer.key = key_of("r");
  p.engine->handle(chunk);
  p.engine->handle(ShutdownCommand{});
  p.engine->handle(chunk);
  chunk.offer.final = true;
  p.engine->handle(chunk);
  pass(10 * kMillisecond);
  expect_end(p, 6, End::kFailed, Reason::kShutdown);
  d.engine->handle(ShutdownCommand{});
  d.grant(5, 100, key_of("r"), {4}, {10});
  d.connect(2, {p.info});
  pass(10 * kMillisecond);
  expect_end(d, 5, End::kFailed, Reason::kShutdown);
  EXPECT_EQ(d.take<ConnectResult>().at(0).status.reason(), Reason::kShutdown);
}

TEST_F(EngineTest, HelloRepeatedChangesNothing) {
  meet(d, p);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  Message hello{20, HelloMessage{10, encode_peer_info(d.info), {{0, 0, 0, 4}}, 1}};
  hello.meeting = 1;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(d.transport->notify("P", encode_message(hello)).is_ok());
  }
  pass(10 * kMillisecond);
  EXPECT_EQ(p.engine->counters().peers, 1U);
  EXPECT_EQ(p.engine->counters().served_live, 1U);
}

TEST_F(EngineTest, StrangersAreCountedAndDropped) {
  meet(d, p);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  const auto stranger = fabric.attach("stranger");
  ASSERT_TRUE(stranger->add_peer(p.info.transport_metadata).is_ok());
  ASSERT_TRUE(stranger->add_peer(d.info.transport_metadata).is_ok());
  const std::uint64_t dropped = p.engine->counters().messages_dropped;
  std::uint64_t sent = 0;
  const auto say = [&](const char* to, const Message& message) {
    ASSERT_TRUE(stranger->notify(to, encode_message(message)).is_ok());
    sent += to[0] == 'P' ? 1 : 0;
  };
  say("P", {20, RevokeMessage{100}});  // D's session, not D's name
  say("P", {20, GoodbyeMessage{}});
  say("P", {77, KeepaliveMessage{}});
  Message hello{20, HelloMessage{10, encode_peer_info(d.info), {{0, 0, 0, 4}}, 1}};
  hello.meeting = 50;
  say("P", hello);
  hello.from = 77;  // D's metadata under another session
  PeerInfo stolen = d.info;
  stolen.session = 77;
  std::get<HelloMessage>(hello.body).peer_info = encode_peer_info(stolen);
  say("P", hello);
  say("D", {10, WrittenMessage{100, {0, 4}, 0, 1}});
  ASSERT_TRUE(stranger->notify("P", Bytes(100, std::byte{7})).is_ok());
  pass(10 * kMillisecond);
  EXPECT_EQ(p.engine->counters().messages_dropped, dropped + sent + 1);
  EXPECT_EQ(p.engine->counters().served_live, 1U);
  EXPECT_TRUE(d.take<EndAction>().empty());
  p.offer(6, key_of("r"), {1});
  pass(10 * kMillisecond);
  expect_end(d, 5, End::kDone);
}

TEST_F(EngineTest, RestartUnderTheSameNameReplacesTheOldSession) {
  meet(d, p);
  d.grant(5, 100, key_of("r"), {4}, {10});
  pass(10 * kMillisecond);
  TestRank& again = add("P", 11);
  d.connect(2, {again.info});
  pass(20 * kMillisecond, &p);
  const auto results = d.take<ConnectResult>();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_TRUE(results[0].status.is_ok()) << results[0].status.message();
  EXPECT_EQ(d.take<PeerLostEvent>().size(), 1U);
  pass(15 * kSecond, &p);  // past the old session's time-out
  expect_end(d, 5, End::kFailed, Reason::kPeerLost);
  again.offer(1, key_of("s"), {1});
  d.grant(6, 101, key_of("s"), {4}, {11});
  pass(10 * kMillisecond, &p);
  expect_end(d, 6, End::kDone);
}

TEST_F(EngineTest, BadBlockIdsFailThatRequestAlone) {
  meet(d, p);
  p.offer(6, key_of("r"), {1});
  d.grant(5, 100, key_of("r"), {4'000}, {10});
  pass(10 * kMillisecond);
  expect_end(d, 5, End::kFailed, Reason::kBadRequest);
  expect_end(p, 6, End::kFailed, Reason::kBadRequest);
  p.offer(7, key_of("s"), {1});
  d.grant(8, 101, key_of("s"), {4}, {10});
  pass(10 * kMillisecond);
  expect_end(d, 8, End::kDone);
}

TEST_F(EngineTest, TwoConsumersAndOneProducer) {
  TestRank& e = add("E", 30);
  meet(d, p);
  meet(e, p);
  p.fill_block(1, 10);
  p.fill_block(2, 20);
  d.grant(5, 100, key_of("r"), {4}, {10});
  e.grant(5, 200, key_of("s"), {4}, {10});
  p.offer(6, key_of("s"), {2});
  p.offer(7, key_of("r"), {1});
  pass(10 * kMillisecond);
  expect_end(d, 5, End::kDone);
  expect_end(e, 5, End::kDone);
  EXPECT_TRUE(d.block_is(4, 10));
  EXPECT_TRUE(e.block_is(4, 20));
}

}  // namespace
}  // namespace kvpush
