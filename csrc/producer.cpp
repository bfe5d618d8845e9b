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

// Ranks of one engine are milliseconds apart, retries of one transfer seconds: a few are enough.
constexpr std::size_t kMaxPastAttempts = 8;

std::size_t count_blocks(const BlockTable& table) {
  std::size_t count = 0;
  for (const GroupBlocks& group : table) {
    count += group.ids.size();
  }
  return count;
}

bool fits_ready(const BlockTable& blocks) {
  return blocks.size() <= kMaxGroups && count_blocks(blocks) <= kMaxBlocksPerGrant;
}

std::string tokens(std::uint32_t count) {
  return std::to_string(count) + " tokens";
}

}  // namespace

// --- the key table ------------------------------------------------------------------------------

Producer::KeyEntry& Producer::entry_for(const TransferKey& key, TimeNs now) {
  KeyEntry& entry = keys_[key];
  entry.forget = now + config_.grant_ttl;
  note_due(entry.forget);
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

std::vector<ServeId> Producer::KeyEntry::retire_attempt() {
  if (attempt != 0) {
    past.push_back(std::exchange(attempt, 0));
    if (past.size() > kMaxPastAttempts) {
      past.erase(past.begin());
    }
  }
  return std::exchange(serves, {});
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
      entry.retire_attempt();  // both legs are gone
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
  if (found != offers_.end() && found->second.withdrawn) {
    found->second.final = found->second.final || command.final;
    return;
  }
  if (found == offers_.end()) {
    const bool known = keys_.contains(command.key);
    const bool taken = known && keys_.at(command.key).offer != 0;
    const bool full =
        offers_.size() >= config_.max_offers || (!known && keys_.size() >= config_.max_keys);
    found = offers_.emplace(command.ticket, Offer{}).first;
    found->second.key = command.key;
    found->second.final = command.final;
    if (taken || full) {
      finish_offer(command.ticket, taken ? Reason::kAmbiguous : Reason::kTableFull,
                   taken ? "another live prefill has the same transfer id and prompt"
                         : "too many offers are live",
                   0, out);
      if (!taken) {
        fail_key(command.key, Reason::kTableFull, now, out);  // grants wait for it in vain
      }
      return;
    }
    KeyEntry& entry = entry_for(command.key, now);
    entry.offer = command.ticket;
    entry.given_up = Reason::kNone;
  }
  Offer& offer = found->second;
  if (!append_blocks(offer.blocks, std::move(command.new_blocks))) {
    end_offer(command.ticket, Reason::kBadRequest, command.final, now, out);
    return;
  }
  offer.watermark = std::max(offer.watermark, command.watermark);
  offer.final = command.final;
  offer.expires = now + config_.offer_ttl;
  note_due(offer.expires);

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
  end_offer(ticket, reason, true, now, out);
}

bool Producer::rewind(Ticket ticket) {
  const auto found = offers_.find(ticket);
  if (found == offers_.end() || found->second.withdrawn) {
    return false;
  }
  Offer& offer = found->second;
  offer.blocks.clear();
  offer.watermark = 0;
  offer.final = false;
  for (auto& [id, serve] : serves_) {
    if (serve.offer == ticket && serve.state == ServeState::kWriting) {
      serve.rewrite_to = std::max(serve.rewrite_to, serve.posted_to);
      serve.posted_to = serve.span.begin;
    }
  }
  return true;
}

bool Producer::writes_in_flight(Ticket ticket) const {
  return offers_.contains(ticket) &&
         std::any_of(serves_.begin(), serves_.end(), [ticket](const auto& entry) {
           return entry.second.offer == ticket && entry.second.posts_in_flight != 0;
         });
}

void Producer::refuse(OfferCommand command, Reason reason, TimeNs now, Actions& out) {
  const Ticket ticket = command.ticket;
  const bool last = std::exchange(command.final, false);
  command.watermark = 0;
  command.new_blocks.clear();
  offer(std::move(command), now, out);  // so that there is something to end, and to report
  end_offer(ticket, reason, last, now, out);
}

void Producer::end_offer(Ticket ticket, Reason reason, bool owner_is_done, TimeNs now,
                         Actions& out) {
  if (owner_is_done && ended_open_.erase(ticket) != 0) {
    return;
  }
  const auto found = offers_.find(ticket);
  if (found == offers_.end()) {
    return;
  }
  Offer& offer = found->second;
  offer.final = offer.final || owner_is_done;  // else finish_offer() remembers it as open
  if (offer.withdrawn) {
    return;
  }
  offer.withdrawn = true;
  offer.reason = reason;
  const TransferKey key = offer.key;
  keys_.at(key).offer = 0;
  if (offer.users == 0) {
    finish_offer(ticket, reason, {}, 0, out);
  }
  give_up_key(key, reason, now, out);
}

void Producer::fail_key(const TransferKey& key, Reason reason, TimeNs now, Actions& out) {
  const auto found = keys_.find(key);
  if (found == keys_.end() ? keys_.size() >= config_.max_keys : found->second.offer != 0) {
    return;  // grants without an offer expire by themselves
  }
  give_up_key(key, reason, now, out);
}

void Producer::give_up_key(const TransferKey& key, Reason reason, TimeNs now, Actions& out) {
  KeyEntry& entry = entry_for(key, now);
  entry.given_up = reason;
  const std::vector<ServeId> serves = entry.retire_attempt();
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
    end_offer(ticket, reason, false, now, out);
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
  if (const auto live = by_attempt_.find(attempt); live != by_attempt_.end()) {
    const Serve& serve = serves_.at(live->second);
    if (is_being_read(serve) && serve.state == ServeState::kWriting) {
      out.emplace_back(ready_message(serve));
    } else {
      out.emplace_back(SendAction{peer.session, AcceptedMessage{message.attempt}});
    }
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
      granted_blocks_ + count_blocks(message.blocks) > config_.max_granted_blocks ||
      (found == keys_.end() && keys_.size() >= config_.max_keys)) {
    return refuse(Reason::kTableFull, "the producer serves too many grants");
  }
  if (found != keys_.end()) {
    const KeyEntry& entry = found->second;
    if (std::find(entry.past.begin(), entry.past.end(), message.attempt) != entry.past.end()) {
      const bool given_up = entry.given_up != Reason::kNone;
      return refuse(given_up ? entry.given_up : Reason::kSuperseded,
                    "this attempt of the transfer is over");
    }
    const bool live = entry.attempt != 0 && !entry.all_ended();
    if (live && entry.engine_id != peer.engine_id) {
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
  const std::vector<ServeId> older = entry.retire_attempt();
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
  note_due(serve.expires);
  granted_blocks_ += count_blocks(serve.blocks);
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

// Up to which token may be posted now; serve.posted_to, or less, if nothing may.
std::uint32_t Producer::post_limit(const Serve& serve, const Offer& offer) const {
  std::uint32_t limit = serve.span.end;
  if (!offer.final) {
    const std::uint32_t granule = config_.granularity_tokens;
    limit = granule == 0 ? 0 : std::min(limit, offer.watermark / granule * granule);
  }
  if (serve.rewrite_to != 0) {
    const bool at_stage =
        serve.posted_to == serve.span.begin || serve.posted_to >= serve.rewrite_to;
    if (at_stage && serve.posts_in_flight != 0) {
      return 0;
    }
    if (serve.posted_to < serve.rewrite_to) {
      limit = std::min(limit, serve.rewrite_to);
    }
  }
  const bool whole = limit == serve.span.end || limit == serve.rewrite_to;
  const std::uint64_t least = std::uint64_t{serve.posted_to} + config_.min_piece_tokens;
  return whole || limit >= least ? limit : 0;
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
  if (config_.reads && (!offer.final || !fits_ready(offer.blocks))) {
    if (offer.final) {
      begin_end(id, Reason::kBadRequest, "the offer has more blocks than a READY may name", now,
                out);
    }
    return;
  }
  const std::uint32_t limit = post_limit(serve, offer);
  if (limit > serve.posted_to) {
    if (serve.posted_to >= serve.rewrite_to) {
      serve.rewrite_to = 0;
    }
    const TokenSpan span{std::exchange(serve.posted_to, limit), limit};
    ++serve.posts_in_flight;
    if (config_.reads) {
      say_ready(serve, now, out);
    } else {
      out.emplace_back(PostAction{id, serve.session, span, limit == serve.span.end});
    }
  }
  if (serve.posts_in_flight == 0 && std::max(serve.posted_to, serve.rewrite_to) >= serve.span.end) {
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
  Serve& serve = serves_.at(id);
  serve.tell_revoked = true;
  if (config_.reads) {
    serve.posts_in_flight = 0;  // it says so only when nothing is being read
  }
  begin_end(id, Reason::kRevoked, "the consumer took its blocks back", now, out);
}

void Producer::on_peer_lost(Session peer, TimeNs fence, TimeNs now, Actions& out) {
  std::vector<ServeId> lost;
  for (auto& [id, serve] : serves_) {
    if (serve.session == peer && !serve.peer_gone) {
      serve.peer_gone = true;
      serve.fence = fence;
      if (config_.reads && fence <= now) {
        serve.posts_in_flight = 0;
      } else if (config_.reads) {
        note_due(fence);
      }
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
    if (is_being_read(serve) && !serve.peer_gone) {
      serve.recalled = now;
      recall(serve, now, out);
    }
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
  granted_blocks_ -= count_blocks(serve.blocks);
  by_attempt_.erase(AttemptKey{serve.session, serve.attempt});
  const bool confirmed = config_.reads && serve.reason == Reason::kNone && !serve.span.empty();
  add_tombstone(AttemptKey{serve.session, serve.attempt}, confirmed);

  if (!serve.peer_gone && serve.tell_revoked) {
    out.emplace_back(SendAction{serve.session, RevokedMessage{serve.attempt}});
  } else if (!serve.peer_gone && serve.reason != Reason::kNone) {
    out.emplace_back(
        SendAction{serve.session, FailedMessage{serve.attempt, serve.reason, serve.detail}});
  } else if (!serve.peer_gone && confirmed) {
    out.emplace_back(SendAction{serve.session, ConfirmedMessage{serve.attempt}});
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
  note_due(entry.offer == 0 ? entry.forget : offers_.at(entry.offer).expires);
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
  if (now < next_due_) {
    return;
  }
  next_due_ = std::numeric_limits<TimeNs>::max();
  expire_serves(now, out);
  if (config_.reads) {
    tick_reads(now, out);
  }
  expire_entries(now, out);
}

void Producer::expire_serves(TimeNs now, Actions& out) {
  std::vector<ServeId> stale;
  for (const auto& [id, serve] : serves_) {
    if (serve.state != ServeState::kWaiting) {
      continue;
    }
    if (now >= serve.expires) {
      stale.push_back(id);
    } else {
      note_due(serve.expires);
    }
  }
  for (const ServeId id : stale) {
    const auto serve = serves_.find(id);
    if (serve == serves_.end()) {
      continue;
    }
    const auto entry = keys_.find(serve->second.key);
    const Reason given_up = entry == keys_.end() ? Reason::kNone : entry->second.given_up;
    const bool expired = given_up == Reason::kNone;
    begin_end(id, expired ? Reason::kGrantExpired : given_up,
              expired ? "no prefill came for this grant" : "the prefill was given up", now, out);
  }
}

void Producer::expire_entries(TimeNs now, Actions& out) {
  std::vector<TransferKey> idle;
  std::vector<Ticket> unclaimed;
  for (const auto& [key, entry] : keys_) {
    if (!entry.serves.empty()) {
      continue;  // what ends them looks at the entry again
    }
    if (entry.offer == 0) {
      if (now >= entry.forget) {
        idle.push_back(key);
      } else {
        note_due(entry.forget);
      }
      continue;
    }
    const Offer& offer = offers_.at(entry.offer);
    if (!offer.final) {
      continue;  // its owner will end it, or make it final
    }
    if (now >= offer.expires) {
      unclaimed.push_back(entry.offer);
    } else {
      note_due(offer.expires);
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

void Producer::add_tombstone(AttemptKey attempt, bool confirmed) {
  if (!tombstones_.emplace(attempt, confirmed).second) {
    return;
  }
  tombstone_order_.push_back(attempt);
  if (tombstone_order_.size() > config_.max_tombstones) {
    tombstones_.erase(tombstone_order_.front());
    tombstone_order_.pop_front();
  }
}

}  // namespace kvpush
