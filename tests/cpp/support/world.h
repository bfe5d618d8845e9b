// Engines over a fabric without faults, driven by hand: what the engine's tests stand on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "engine.h"
#include "peering.h"
#include "sim/sim_fabric.h"
#include "support/script.h"
#include "support/tiny_regions.h"

namespace kvpush {

// One engine with memory of its own: two layers, four heads, eight blocks.
class TestRank {
 public:
  static constexpr std::uint32_t kBlocks = 8;
  static constexpr std::uint32_t kHeads = 4;

  TestRank(sim::EventQueue& queue, sim::SimFabric& fabric, std::string name, Session session,
           EngineConfig config = {}, std::string model = "tiny")
      : memory(2 * kBlocks * tiny_block_bytes(kHeads)),
        clock(queue, 0, 0),
        transport(fabric.attach(name)) {
    const auto base = reinterpret_cast<std::uint64_t>(memory.data());
    const MemoryRange range{base, memory.size(), MemoryKind::kHost, 0};
    EXPECT_TRUE(transport->register_memory({&range, 1}).is_ok());
    info.session = session;
    info.engine_id = std::move(name);
    info.facts = {{"model", std::move(model)}};
    info.regions = tiny_regions(base, kBlocks, 0, kHeads, kHeads);
    info.transport_metadata = transport->local_metadata().value();
    fence = make_host_fence();
    engine = std::make_unique<Engine>(*transport, clock, *fence, config, info);
  }

  void tick() {
    engine->tick();
    engine->take_events(events);
  }
  std::byte* block(int layer, BlockId id) {
    const std::size_t bytes = tiny_block_bytes(kHeads);
    return memory.data() + (static_cast<std::size_t>(layer) * kBlocks + id) * bytes;
  }
  void fill_block(BlockId id, int value) {
    for (int layer = 0; layer < 2; ++layer) {
      std::fill_n(block(layer, id), tiny_block_bytes(kHeads),
                  static_cast<std::byte>(value + layer));
    }
  }
  bool block_is(BlockId id, int value) {
    for (int layer = 0; layer < 2; ++layer) {
      const std::byte* begin = block(layer, id);
      if (!std::all_of(begin, begin + tiny_block_bytes(kHeads), [&](std::byte byte) {
            return byte == static_cast<std::byte>(value + layer);
          })) {
        return false;
      }
    }
    return true;
  }
  void offer(Ticket ticket, const TransferKey& key, std::vector<BlockId> ids, bool final = true) {
    FencedOfferCommand command;
    command.offer.ticket = ticket;
    command.offer.key = key;
    command.offer.watermark = static_cast<std::uint32_t>(ids.size()) * kTinyTokensPerBlock;
    command.offer.new_blocks = {GroupBlocks{0, std::move(ids)}};
    command.offer.final = final;
    engine->handle(std::move(command));
  }
  void grant(Ticket ticket, Attempt attempt, const TransferKey& key, std::vector<BlockId> ids,
             std::vector<Session> writers, DurationNs wait = 60 * kSecond) {
    GrantCommand command;
    command.ticket = ticket;
    command.attempt = attempt;
    command.key = key;
    command.span = {0, static_cast<std::uint32_t>(ids.size()) * kTinyTokensPerBlock};
    command.blocks = {GroupBlocks{0, std::move(ids)}};
    command.writers = std::move(writers);
    command.deadline = clock.now() + wait;
    engine->handle(std::move(command));
  }
  void connect(std::uint64_t id, const std::vector<PeerInfo>& producers,
               DurationNs wait = 10 * kSecond) {
    ConnectCommand command;
    command.id = id;
    const auto targets = find_targets(producers, std::vector{info}, 0);
    ASSERT_TRUE(targets.is_ok()) << targets.message();
    command.targets = targets.value();
    command.deadline = clock.now() + wait;
    engine->handle(std::move(command));
  }

  // The events of one kind since the last call.
  template <typename Kind>
  std::vector<Kind> take() {
    std::vector<Kind> found;
    for (auto event = events.begin(); event != events.end();) {
      if (auto* match = std::get_if<Kind>(&*event)) {
        found.push_back(std::move(*match));
        event = events.erase(event);
      } else {
        ++event;
      }
    }
    return found;
  }

  Bytes memory;
  sim::SimClock clock;
  std::unique_ptr<sim::SimTransport> transport;
  std::unique_ptr<DeviceFence> fence;
  PeerInfo info;
  std::unique_ptr<Engine> engine;
  std::vector<EngineEvent> events;
};

class EngineWorld : public ::testing::Test {
 protected:
  TestRank& add(const std::string& name, Session session, EngineConfig config = {},
                std::string model = "tiny") {
    ranks.push_back(
        std::make_unique<TestRank>(queue, fabric, name, session, config, std::move(model)));
    return *ranks.back();
  }
  // Lets time pass for all engines but `stopped`.
  void pass(DurationNs time, const TestRank* stopped = nullptr) {
    const TimeNs until = queue.now() + time;
    while (queue.now() < until) {
      queue.run_until(std::min(until, queue.now() + kMillisecond));
      for (const auto& rank : ranks) {
        if (rank.get() != stopped) {
          rank->tick();
        }
      }
    }
  }
  void meet(TestRank& consumer, TestRank& producer) {
    consumer.connect(1, {producer.info});
    pass(10 * kMillisecond);
    const auto results = consumer.take<ConnectResult>();
    ASSERT_EQ(results.size(), 1U);
    ASSERT_TRUE(results[0].status.is_ok()) << results[0].status.message();
  }
  static void expect_end(TestRank& rank, Ticket ticket, End end, Reason reason = Reason::kNone) {
    const auto ends = rank.take<EndAction>();
    ASSERT_EQ(ends.size(), 1U);
    EXPECT_EQ(ends[0].ticket, ticket);
    EXPECT_EQ(ends[0].end, end) << reason_name(ends[0].reason) << ": " << ends[0].detail;
    EXPECT_EQ(ends[0].reason, reason) << reason_name(ends[0].reason) << ": " << ends[0].detail;
  }
  // A consumer takes two blocks, scattered and of no neighbour, from a producer it has not met yet.
  void expect_kv_goes_from_offer_to_grant(TestRank& d, TestRank& p) {
    const TransferKey key = script::key_of("r");
    meet(d, p);
    p.fill_block(1, 10);
    p.fill_block(2, 20);
    d.fill_block(7, 99);
    d.grant(5, 100, key, {4, 3}, {p.info.session});
    pass(10 * kMillisecond);
    p.offer(6, key, {1, 2});
    pass(10 * kMillisecond);
    expect_end(d, 5, End::kDone);
    expect_end(p, 6, End::kDone);
    EXPECT_TRUE(d.block_is(4, 10));
    EXPECT_TRUE(d.block_is(3, 20));
    EXPECT_TRUE(d.block_is(7, 99));
    expect_at_rest(p);
    expect_at_rest(d);
  }
  static void expect_at_rest(TestRank& rank) {
    const EngineCounters counters = rank.engine->counters();
    EXPECT_EQ(counters.grants_live + counters.offers_live + counters.served_live +
                  counters.handles_in_flight + counters.posts_queued + counters.fences_waiting,
              0U);
    EXPECT_EQ(rank.transport->counts().handles, 0U);
  }

  // As on a fabric that lets a peer which has been removed go on: the engines must see to it.
  static sim::FabricFaults lenient() {
    sim::FabricFaults faults;
    faults.removal_breaks = false;
    return faults;
  }

  sim::EventQueue queue;
  sim::SimFabric fabric{queue, sim::Random(1), lenient()};
  std::vector<std::unique_ptr<TestRank>> ranks;
};

}  // namespace kvpush
