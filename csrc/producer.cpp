#include "producer.h"

#include <algorithm>

namespace kvpush {

namespace {

// False if the number of groups differs from that offered before.
bool append_blocks(BlockTable& table, BlockTable&& more) {
  if (table.empty()) {
    table = std::move(more);
    return true;
  }
  if (!more.empty() && more.size() != table.size()) {
    return false;
  }
  for (std::size_t group = 0; group < more.size(); ++group) {
    auto& ids = table[group].ids;
    ids.insert(ids.end(), more[group].ids.begin(), more[group].ids.end());
  }
  return true;
}

std::string tokens(std::uint32_t count) { return std::to_string(count) + " tokens"; }

}  // namespace

// --- the key table ------------------------------------------------------------------------------

Producer::KeyEntry& Producer::entry_for(const TransferKey& key, TimeNs now) {
  KeyEntry& entry = keys_[key];
  entry.forget = now + config_.grant_ttl;
  return entry;
}

void Producer::KeyEntry::start_attempt(Attempt next, std::string engine, std::uint32_t ranks) {
  attempt = next;
  engine_id = std::move(engine);
  fan_out = std::max(ranks, 1U);
  ended = 0;
  reason = Reason::kNone;
  detail.clear();
  culprit = 0;
}

// Ends the entry's offer if all that it waits for has ended, and forgets what has been settled.
void Producer::settle_entry(const TransferKey& key, Actions& out) {
  const auto found = keys_.find(key);
  if (found == keys_.end()) {
    return;
  }
  KeyEntry& entry = found->second;
  if (entry.all_ended()) {
    if (entry.offer != 0 && offers_.at(entry.offer).users == 0) {
      finish_offer(std::exchange(entry.offer, 0), entry.reason, entry.detail, entry.culprit, out);
      entry.attempt = 0;  // offer and grants have met: nothing to remember
    } else if (entry.offer == 0 && entry.given_up != Reason::kNone) {
      entry.attempt = 0;  // both legs are gone
    }
  }
  // Grants that ended before their offer, and a prefill given up before its grants, are remembered
  // until on_tick() finds them too old.
  if (entry.offer == 0 && entry.attempt == 0 && entry.given_up == Reason::kNone) {
    keys_.erase(found);
  }
}

// --- offers -------------------------------------------------------------------------------------

void Producer::offer(OfferCommand command, TimeNs now, Actions& out) {
  if (ended_open_.contains(command.ticket)) {
    if (command.final) {
      ended_open_.erase(command.ticket);
    }
    return;
  }
  auto found = offers_.find(command.ticket);
  if (found == offers_.end()) {
    const bool taken = keys_.contains(command.key) && keys_.at(command.key).offer != 0;
    const bool full = offers_.size() >= config_.max_offers || keys_.size() >= config_.max_keys;
    found = offers_.emplace(command.ticket, Offer{}).first;
    found->second.key = command.key;
    found->second.final = command.final;
    if (taken || full) {
      finish_offer(command.ticket, taken ? Reason::kAmbiguous : Reason::kTableFull,
                   taken ? "another live prefill has the same transfer id and prompt"
                         : "too many offers are live",
                   0, out);
      return;
    }
    KeyEntry& entry = entry_for(command.key, now);
    entry.offer = command.ticket;
    entry.given_up = Reason::kNone;
  }
  Offer& offer = found->second;
  if (!append_blocks(offer.blocks, std::move(command.new_blocks))) {
    withdraw(command.ticket, Reason::kBadRequest, now, out);
    return;
  }
  offer.watermark = std::max(offer.watermark, command.watermark);
  offer.final = command.final;
  offer.expires = now + config_.offer_ttl;

  const TransferKey key = offer.key;
  const std::vector<ServeId> serves = keys_.at(key).serves;
  for (const ServeId id : serves) {
    Serve& serve = serves_.at(id);
    if (serve.state == ServeState::kWaiting) {
      pair(id, serve, command.ticket, now, out);
    } else {
      advance(id, now, out);
    }
  }
  settle_entry(key, out);
}

void Producer::withdraw(Ticket ticket, Reason reason, TimeNs now, Actions& out) {
  if (ended_open_.erase(ticket) != 0) {
    return;
  }
  const auto found = offers_.find(ticket);
  if (found == offers_.end() || found->second.withdrawn) {
    return;
  }
  Offer& offer = found->second;
  offer.withdrawn = true;
  offer.final = true;  // nothing more will be added
  offer.reason = reason;
  const TransferKey key = offer.key;
  keys_.at(key).offer = 0;
  if (offer.users == 0) {
    finish_offer(ticket, reason, {}, 0, out);
  }
  fail_key(key, reason, now, out);
}

void Producer::fail_key(const TransferKey& key, Reason reason, TimeNs now, Actions& out) {
  if (!keys_.contains(key) && keys_.size() >= config_.max_keys) {
    return;  // grants without an offer expire by themselves
  }
  KeyEntry& entry = entry_for(key, now);
  entry.given_up = reason;
  const std::vector<ServeId> serves = entry.serves;
  for (const ServeId id : serves) {
    begin_end(id, reason, "the prefill was given up", now, out);
  }
  settle_entry(key, out);
}

void Producer::withdraw_all(Reason reason, TimeNs now, Actions& out) {
  std::vector<Ticket> tickets;
  for (const auto& [ticket, offer] : offers_) {
    tickets.push_back(ticket);
  }
  for (const Ticket ticket : tickets) {
    withdraw(ticket, reason, now, out);
  }
  std::vector<ServeId> serves;
  for (const auto& [id, serve] : serves_) {
    serves.push_back(id);
  }
  for (const ServeId id : serves) {
    begin_end(id, reason, "the producer is stopping", now, out);
  }
}

void Producer::finish_offer(Ticket ticket, Reason reason, std::string detail, Session culprit,
                            Actions& out) {
  const auto found = offers_.find(ticket);
  KVPUSH_CHECK(found != offers_.end(), "an offer ends once");
  EndAction end;
  end.ticket = ticket;
  end.end = reason == Reason::kNone ? End::kDone : End::kFailed;
  end.reason = reason;
  end.detail = std::move(detail);
  end.peer = culprit;
  end.stats = found->second.stats;
  if (!found->second.final) {
    ended_open_.insert(ticket);
  }
  offers_.erase(found);
  out.emplace_back(std::move(end));
}

// --- grants -------------------------------------------------------------------------------------

bool Producer::refuse_grant(const ConsumerPeer& peer, const GrantMessage& message, TimeNs /*now*/,
                            Actions& out) {
  const AttemptKey attempt{peer.session, message.attempt};
  if (by_attempt_.contains(attempt)) {
    out.emplace_back(SendAction{peer.session, AcceptedMessage{message.attempt}});
    return true;
  }
  if (tombstones_.contains(attempt)) {
    out.emplace_back(SendAction{peer.session, RevokedMessage{message.attempt}});
    return true;
  }
  const auto found = keys_.find(message.key);
  const auto refuse = [&](Reason reason, std::string detail) {
    out.emplace_back(
        SendAction{peer.session, FailedMessage{message.attempt, reason, std::move(detail)}});
    add_tombstone(attempt);
    return true;
  };
  if (serves_.size() >= config_.max_serves ||
      (found == keys_.end() && keys_.size() >= config_.max_keys)) {
    return refuse(Reason::kTableFull, "the producer serves too many grants");
  }
  if (found != keys_.end()) {
    const KeyEntry& entry = found->second;
    const bool other_attempt = entry.attempt != 0 && entry.attempt != message.attempt;
    if (other_attempt && !entry.all_ended() && entry.engine_id != peer.engine_id) {
      return refuse(Reason::kAmbiguous,
                    "another consumer engine has a live grant with this transfer id and prompt");
    }
  }
  return false;
}

// Makes `attempt` the entry's attempt, superseding an older one of the same engine.
void Producer::join_attempt(KeyEntry& entry, const ConsumerPeer& peer, Attempt attempt, TimeNs now,
                            Actions& out) {
  if (entry.attempt == attempt) {
    return;
  }
  const std::vector<ServeId> older = std::exchange(entry.serves, {});
  entry.start_attempt(attempt, peer.engine_id, peer.fan_out);
  for (const ServeId id : older) {
    begin_end(id, Reason::kSuperseded, "a newer attempt of this transfer came", now, out);
  }
}

void Producer::on_grant(const ConsumerPeer& peer, GrantMessage message, TimeNs now, Actions& out) {
  if (refuse_grant(peer, message, now, out)) {
    return;
  }
  const TransferKey key = message.key;
  KeyEntry& entry = entry_for(key, now);
  join_attempt(entry, peer, message.attempt, now, out);

  const ServeId id = next_serve_++;
  Serve serve;
  serve.session = peer.session;
  serve.attempt = message.attempt;
  serve.key = key;
  serve.span = message.span;
  serve.blocks = std::move(message.blocks);
  serve.posted_to = message.span.begin;
  const bool given_up = entry.given_up != Reason::kNone;
  serve.expires = now + (given_up ? config_.retry_grace : config_.grant_ttl);
  by_attempt_.emplace(AttemptKey{peer.session, message.attempt}, id);
  Serve& placed = serves_.emplace(id, std::move(serve)).first->second;
  entry.serves.push_back(id);
  out.emplace_back(SendAction{peer.session, AcceptedMessage{message.attempt}});

  if (placed.span.empty()) {
    finish_serve(id, now, out);  // nothing is needed
  } else if (entry.offer != 0) {
    pair(id, placed, entry.offer, now, out);
  }
  settle_entry(key, out);
}

void Producer::pair(ServeId id, Serve& serve, Ticket offer, TimeNs now, Actions& out) {
  serve.state = ServeState::kWriting;
  serve.offer = offer;
  ++offers_.at(offer).users;
  advance(id, now, out);
}

// Posts what the offer's watermark allows, and ends the serve when all of it is written.
void Producer::advance(ServeId id, TimeNs now, Actions& out) {
  Serve& serve = serves_.at(id);
  if (serve.state != ServeState::kWriting) {
    return;
  }
  const Offer& offer = offers_.at(serve.offer);
  if (offer.final && offer.watermark < serve.span.end) {
    begin_end(id, Reason::kProducerShort,
              "the prefill ended with " + tokens(offer.watermark) + " of KV, " +
                  tokens(serve.span.end) + " were granted",
              now, out);
    return;
  }
  std::uint32_t limit = serve.span.end;
  if (!offer.final) {
    const std::uint32_t granule = config_.granularity_tokens;
    limit = granule == 0 ? 0 : std::min(limit, offer.watermark / granule * granule);
  }
  if (limit > serve.posted_to) {
    out.emplace_back(PostAction{id, serve.session, TokenSpan{serve.posted_to, limit},
                                limit == serve.span.end});
    serve.posted_to = limit;
    ++serve.posts_in_flight;
  }
  if (serve.posts_in_flight == 0 && serve.posted_to >= serve.span.end) {
    finish_serve(id, now, out);
  }
}

void Producer::on_revoke(Session from, const RevokeMessage& message, TimeNs now, Actions& out) {
  const auto found = by_attempt_.find(AttemptKey{from, message.attempt});
  if (found == by_attempt_.end()) {
    add_tombstone(AttemptKey{from, message.attempt});  // its GRANT may still be on the way
    out.emplace_back(SendAction{from, RevokedMessage{message.attempt}});
    return;
  }
  const ServeId id = found->second;
  serves_.at(id).tell_revoked = true;
  begin_end(id, Reason::kRevoked, "the consumer took its blocks back", now, out);
}

void Producer::on_peer_lost(Session peer, TimeNs now, Actions& out) {
  std::vector<ServeId> lost;
  for (auto& [id, serve] : serves_) {
    if (serve.session == peer) {
      serve.peer_gone = true;
      lost.push_back(id);
    }
  }
  for (const ServeId id : lost) {
    begin_end(id, Reason::kPeerLost, "the consumer is gone", now, out);
  }
}

void Producer::begin_end(ServeId id, Reason reason, std::string detail, TimeNs now, Actions& out) {
  const auto found = serves_.find(id);
  if (found == serves_.end()) {
    return;
  }
  Serve& serve = found->second;
  if (serve.state != ServeState::kEnding) {
    serve.state = ServeState::kEnding;
    serve.reason = reason;
    serve.detail = std::move(detail);
  }
  if (serve.posts_in_flight == 0) {
    finish_serve(id, now, out);
  }
}

void Producer::finish_serve(ServeId id, TimeNs /*now*/, Actions& out) {
  const auto found = serves_.find(id);
  KVPUSH_CHECK(found != serves_.end() && found->second.posts_in_flight == 0,
               "a serve ends once, with nothing in flight");
  Serve serve = std::move(found->second);
  serves_.erase(found);
  by_attempt_.erase(AttemptKey{serve.session, serve.attempt});
  add_tombstone(AttemptKey{serve.session, serve.attempt});

  if (!serve.peer_gone && serve.tell_revoked) {
    out.emplace_back(SendAction{serve.session, RevokedMessage{serve.attempt}});
  } else if (!serve.peer_gone && serve.reason != Reason::kNone) {
    out.emplace_back(
        SendAction{serve.session, FailedMessage{serve.attempt, serve.reason, serve.detail}});
  }
  if (const auto offer = offers_.find(serve.offer); offer != offers_.end()) {
    if (--offer->second.users == 0 && offer->second.withdrawn) {
      finish_offer(serve.offer, offer->second.reason, {}, 0, out);
    }
  }
  const auto key = keys_.find(serve.key);
  if (key == keys_.end()) {
    return;  // a superseded serve outlived its key
  }
  KeyEntry& entry = key->second;
  if (entry.attempt == serve.attempt) {
    std::erase(entry.serves, id);
    ++entry.ended;
    if (entry.reason == Reason::kNone && serve.reason != Reason::kNone) {
      entry.reason = serve.reason;
      entry.detail = serve.detail;
      entry.culprit = serve.session;
    }
  }
  settle_entry(serve.key, out);
}

void Producer::on_post_ended(ServeId id, Reason reason, std::string detail, const PostStats& stats,
                             TimeNs now, Actions& out) {
  const auto found = serves_.find(id);
  KVPUSH_CHECK(found != serves_.end() && found->second.posts_in_flight > 0,
               "a post ends once, before its serve does");
  Serve& serve = found->second;
  --serve.posts_in_flight;
  if (const auto offer = offers_.find(serve.offer); offer != offers_.end()) {
    offer->second.stats.add(stats);
  }
  if (reason != Reason::kNone || serve.state == ServeState::kEnding) {
    begin_end(id, reason, std::move(detail), now, out);
  } else {
    advance(id, now, out);
  }
}

// --- time ---------------------------------------------------------------------------------------

void Producer::on_tick(TimeNs now, Actions& out) {
  std::vector<ServeId> stale;
  for (const auto& [id, serve] : serves_) {
    if (serve.state == ServeState::kWaiting && now >= serve.expires) {
      stale.push_back(id);
    }
  }
  for (const ServeId id : stale) {
    const auto serve = serves_.find(id);
    if (serve == serves_.end()) {
      continue;
    }
    const Reason given_up = keys_.at(serve->second.key).given_up;
    const bool expired = given_up == Reason::kNone;
    begin_end(id, expired ? Reason::kGrantExpired : given_up,
              expired ? "no prefill came for this grant" : "the prefill was given up", now, out);
  }

  std::vector<TransferKey> idle;
  std::vector<Ticket> unclaimed;
  for (const auto& [key, entry] : keys_) {
    if (entry.offer != 0) {
      const Offer& offer = offers_.at(entry.offer);
      if (offer.final && !offer.withdrawn && entry.serves.empty() && now >= offer.expires) {
        unclaimed.push_back(entry.offer);
      }
    } else if (entry.serves.empty() && now >= entry.forget) {
      idle.push_back(key);
    }
  }
  for (const TransferKey& key : idle) {
    keys_.erase(key);
  }
  for (const Ticket ticket : unclaimed) {
    withdraw(ticket, Reason::kOfferExpired, now, out);
  }
}

// --- what a post needs --------------------------------------------------------------------------

bool Producer::may_post(ServeId id) const {
  const auto serve = serves_.find(id);
  return serve != serves_.end() && serve->second.state == ServeState::kWriting;
}

const BlockTable* Producer::consumer_blocks(ServeId id) const {
  const auto serve = serves_.find(id);
  return serve == serves_.end() ? nullptr : &serve->second.blocks;
}

const BlockTable* Producer::producer_blocks(ServeId id) const {
  const auto serve = serves_.find(id);
  if (serve == serves_.end()) {
    return nullptr;
  }
  const auto offer = offers_.find(serve->second.offer);
  return offer == offers_.end() ? nullptr : &offer->second.blocks;
}

Attempt Producer::attempt_of(ServeId id) const {
  const auto serve = serves_.find(id);
  return serve == serves_.end() ? 0 : serve->second.attempt;
}

void Producer::add_tombstone(AttemptKey attempt) {
  if (!tombstones_.emplace(attempt, true).second) {
    return;
  }
  tombstone_order_.push_back(attempt);
  if (tombstone_order_.size() > config_.max_tombstones) {
    tombstones_.erase(tombstone_order_.front());
    tombstone_order_.pop_front();
  }
}

}  // namespace kvpush
