// The two state machines with short names for what goes in, for scripts: see script.h for what
// comes out.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "consumer.h"
#include "producer.h"
#include "support/script.h"

namespace kvpush::script {

// A consumer whose grants are all of two blocks and under one key.
class ConsumerMachine : public ::testing::Test {
 protected:
  explicit ConsumerMachine(ConsumerConfig config = {}) : consumer(config) {}

  void grant(Ticket ticket, Attempt attempt, std::vector<Session> writers, TokenSpan span = {0, 32},
             TimeNs deadline = 100 * kSecond) {
    GrantCommand command;
    command.ticket = ticket;
    command.attempt = attempt;
    command.key = key_of("r");
    command.span = span;
    command.blocks = {GroupBlocks{0, {1, 2}}};
    command.writers = std::move(writers);
    command.deadline = deadline;
    consumer.grant(std::move(command), now, out);
  }
  bool revoked(Session from, Attempt attempt) {
    return consumer.on_revoked(from, {attempt}, now, out);
  }
  bool failed(Session from, Attempt attempt, Reason reason = Reason::kProducerAborted) {
    return consumer.on_failed(from, {attempt, reason, ""}, now, out);
  }
  void revoke(Ticket ticket) { consumer.revoke(ticket, Reason::kRevoked, now, out); }
  void lose(Session peer, DurationNs fence) { consumer.on_peer_lost(peer, now + fence, now, out); }
  void tick(DurationNs later = 0) {
    now += later;
    consumer.on_tick(now, out);
  }

  TimeNs now = kSecond;
  Actions out;
  Consumer consumer;
};

// A producer; `granted` are the blocks that every grant names.
class ProducerMachine : public ::testing::Test {
 protected:
  static constexpr Session kOtherEngine = 9;  // all other sessions are of one

  explicit ProducerMachine(ProducerConfig config_ = {}, BlockTable granted_ = {})
      : config(config_), granted(std::move(granted_)), producer(config) {}

  void offer(Ticket ticket, std::uint32_t watermark, bool final, const std::string& id,
             std::vector<BlockId> blocks) {
    OfferCommand command;
    command.ticket = ticket;
    command.key = key_of(id);
    command.new_blocks = {GroupBlocks{0, std::move(blocks)}};
    command.watermark = watermark;
    command.final = final;
    producer.offer(std::move(command), now, out);
  }
  void grant(Session from, Attempt attempt, TokenSpan span = {0, 32}, std::uint32_t fan_out = 1,
             const std::string& id = "r") {
    GrantMessage message;
    message.attempt = attempt;
    message.key = key_of(id);
    message.span = span;
    message.blocks = granted;
    producer.on_grant({from, from == kOtherEngine ? "other" : "engine", fan_out},
                      std::move(message), now, out);
  }
  void revoke(Session from, Attempt attempt) { producer.on_revoke(from, {attempt}, now, out); }
  void withdraw(Ticket ticket) { producer.withdraw(ticket, Reason::kProducerAborted, now, out); }
  void tick(DurationNs later) {
    now += later;
    producer.on_tick(now, out);
  }
  void expect_at_rest() {
    EXPECT_EQ(producer.live_offers(), 0U);
    EXPECT_EQ(producer.live_serves(), 0U);
    tick(config.grant_ttl);
    EXPECT_EQ(producer.keys(), 0U);
    EXPECT_EQ(take(out), Lines{});
  }

  TimeNs now = kSecond;
  Actions out;
  ProducerConfig config;
  BlockTable granted;
  Producer producer;
};

}  // namespace kvpush::script
