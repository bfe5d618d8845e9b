// Producer: the state machine of the offers a producer rank makes and the grants it serves. Pure:
// see rendezvous.h.
//
// Theory of operation
//
// A transfer is met under its key (transfer id, fingerprint). An entry of the key table holds the
// offer, if one was made, and the grants of ONE attempt of ONE consumer engine: as many as that
// engine has ranks that need this rank (its fan-out). Whichever of offer and grant comes second
// starts the writing. For each grant served:
//
//   kWaiting   granted, no offer yet
//   kWriting   paired: what the watermark allows is posted; whole granules before `final`
//   kEnding    given up or revoked: nothing more is posted; posts in flight are waited for
//
//   kWaiting -> kWriting      an offer with its key comes (or was there)
//   kWriting -> ended, done   `final` was said and every post of the span has ended well
//   any      -> kEnding       REVOKE, withdrawn, superseded, too short, post failed, expired, peer
//   lost kEnding  -> ended         its last post has ended: only now FAILED or REVOKED is said,
//   because
//                             both promise that nothing more is written (design, rules 1 and 2)
//
// An offer ends when all grants of its attempt have ended, or it is withdrawn or expires and
// nothing of it is in flight (rule 3: RMA can't be cancelled). Its end is reported once. When the
// grants end before the offer is made, the entry remembers that, so that the offer ends at once.
//
// A newer attempt of the same engine supersedes the older one; another engine with the same key
// can't be told apart from a mistake and is refused as ambiguous, as is a second offer. Attempts
// have no order, so the entry remembers the last ones that are over: the GRANT of another rank that
// comes late must not supersede the newer attempt, and fails like its siblings.
// When the prefill is given up, the attempt it would have served is over with it: an offer made
// under the key later waits for an attempt of its own.
// Ended grants are remembered for a while: a late or repeated GRANT must not raise the dead.
//
// A prefill that is preempted takes back what it has offered (rewind), since its blocks will hold
// something else; its owner lets nothing overwrite them before writes_in_flight() says so. What it
// then offers anew is written from the start, in two stages: first what had been written before,
// and only when all of that has ended the rest. So old and new writes are never in flight
// together, and the consumer, which counts what it was told once, is not complete before the new
// bytes are in place.
//
// Pull (`ProducerConfig::reads`): instead of posting, kWriting says READY with the offer's blocks
// once the offer is final, and counts that as one post in flight, which ends with READ_DONE
// (answered by CONFIRMED), REVOKE, or the fence of a lost consumer: until then it may be reading.
// kEnding says RECALL to ask for that end, and a consumer that leaves it unanswered is dropped. So
// the rules above hold as they are written: FAILED is said, and the offer ends, when nothing is in
// flight. See producer_pull.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "clock.h"
#include "rendezvous.h"

namespace kvpush {

struct ProducerConfig {
  DurationNs offer_ttl = 120 * kSecond;  // a final offer without its consumers
  DurationNs grant_ttl = 240 * kSecond;  // a grant without its offer
  // A grant that comes after its prefill was given up waits this long only: a retry under the same
  // id may be on its way.
  DurationNs retry_grace = 5 * kSecond;
  // Before `final` only multiples of this many tokens are written; 0: write at `final` only.
  std::uint32_t granularity_tokens = 0;
  // Before `final` pieces of fewer tokens than this wait for more.
  std::uint32_t min_piece_tokens = 0;
  bool reads = false;                         // pull: consumers READ, and nothing is written
  DurationNs resend = 2 * kSecond;            // pull: between repeats of RECALL
  DurationNs recall_patience = 20 * kSecond;  // pull: RECALL unanswered: the peer is dropped
  std::size_t max_serves = 65'536;            // thousands of requests x ranks
  std::size_t max_offers = 65'536;
  std::size_t max_keys = 131'072;       // each offer and each grant may have a key of its own
  std::size_t max_tombstones = 65'536;  // some 100 bytes each: 7 MB
  // Block ids of all grants served: 256 MB. Ten thousand prompts of a million tokens have 640
  // million blocks of 16, but no cache holds them.
  std::size_t max_granted_blocks = 64U << 20;
};

struct OfferCommand {
  Ticket ticket = 0;
  TransferKey key;
  BlockTable new_blocks;  // appended to those offered before
  std::uint32_t watermark = 0;
  bool final = false;
};

// Who a message is from: what the engine knows of the peer.
struct ConsumerPeer {
  Session session = 0;
  std::string engine_id;
  std::uint32_t fan_out = 1;
};

class Producer {
 public:
  explicit Producer(ProducerConfig config) : config_(config) {}

  void offer(OfferCommand command, TimeNs now, Actions& out);
  // The owner ends its offer early and adds nothing more. An unknown ticket is ignored; see
  // fail_key().
  void withdraw(Ticket ticket, Reason reason, TimeNs now, Actions& out);
  // Nothing is offered any more under this ticket, until its owner offers anew. False if the offer
  // has ended, or never was.
  bool rewind(Ticket ticket);
  // Whether its blocks are still being read.
  bool writes_in_flight(Ticket ticket) const;
  // Takes a command whose KV is not to be used, and ends its offer. Its owner may still add to it
  // (unless this was the last command), which then has no effect.
  void refuse(OfferCommand command, Reason reason, TimeNs now, Actions& out);
  // Says that no offer will come for this key: waiting grants fail now, later ones soon. Without
  // effect while an offer is live under the key: the grants are that one's.
  void fail_key(const TransferKey& key, Reason reason, TimeNs now, Actions& out);
  void withdraw_all(Reason reason, TimeNs now, Actions& out);

  void on_grant(const ConsumerPeer& peer, GrantMessage message, TimeNs now, Actions& out);
  void on_revoke(Session from, const RevokeMessage& message, TimeNs now, Actions& out);
  void on_read_done(Session from, const ReadDoneMessage& message, TimeNs now, Actions& out);
  // The peer is lost; where consumers READ, it may do so until `fence`.
  void on_peer_lost(Session peer, TimeNs fence, TimeNs now, Actions& out);

  // One PostAction has ended: every handle made for it has ended. `reason` is kNone when all of its
  // bytes are in the consumer's memory and announced.
  void on_post_ended(ServeId serve, Reason reason, std::string detail, const PostStats& stats,
                     TimeNs now, Actions& out);
  // Does nothing, at no cost, while nothing is due.
  void on_tick(TimeNs now, Actions& out);

  // Rule 1: asked before each post.
  bool may_post(ServeId serve) const;
  // What a post needs; null once the serve or its offer has ended.
  const BlockTable* consumer_blocks(ServeId serve) const;
  const BlockTable* producer_blocks(ServeId serve) const;
  // For the WRITTEN of a post.
  Attempt attempt_of(ServeId serve) const;

  std::size_t live_offers() const noexcept { return offers_.size(); }
  std::size_t live_serves() const noexcept { return serves_.size(); }
  std::size_t keys() const noexcept { return keys_.size(); }

 private:
  enum class ServeState : std::uint8_t { kWaiting, kWriting, kEnding };
  struct Serve {
    Session session = 0;
    Attempt attempt = 0;
    TransferKey key;
    TokenSpan span;
    BlockTable blocks;
    ServeState state = ServeState::kWaiting;
    Ticket offer = 0;
    std::uint32_t posted_to = 0;
    // After a rewind: up to here it had been written before. 0: not rewound, or past it.
    std::uint32_t rewrite_to = 0;
    std::uint32_t posts_in_flight = 0;
    TimeNs expires = 0;
    Reason reason = Reason::kNone;
    std::string detail;
    bool tell_revoked = false;  // the consumer asked: answer REVOKED rather than FAILED
    bool peer_gone = false;     // nobody to tell
    // Pull.
    TimeNs fence = 0;  // once peer_gone: nothing is read any more
    TimeNs recalled = 0;
    TimeNs last_recall = 0;
  };
  struct Offer {
    TransferKey key;
    BlockTable blocks;
    std::uint32_t watermark = 0;
    bool final = false;
    bool withdrawn = false;  // no longer in the key table: lives on until its users have ended
    Reason reason = Reason::kNone;
    TimeNs expires = 0;       // meaningful once final
    std::uint32_t users = 0;  // serves that write from its blocks
    PostStats stats;
  };
  // The grants of one attempt, met under one key.
  struct KeyEntry {
    Ticket offer = 0;
    Attempt attempt = 0;  // 0: no grant yet
    std::string engine_id;
    std::uint32_t fan_out = 0;
    std::uint32_t ended = 0;
    Reason reason = Reason::kNone;  // the first failure among the grants that have ended
    std::string detail;
    Session culprit = 0;
    std::vector<ServeId> serves;  // live ones of this attempt
    // The last attempts that are over, the newest last; see above.
    std::vector<Attempt> past;
    Reason given_up = Reason::kNone;  // the prefill was given up: no offer is expected
    TimeNs forget = 0;                // an entry with nothing live is dropped at this time

    bool all_ended() const noexcept { return attempt != 0 && serves.empty() && ended >= fan_out; }
    void start_attempt(Attempt next, std::string engine, std::uint32_t ranks);
    // Its attempt is over. Gives the grants that were live.
    std::vector<ServeId> retire_attempt();
  };
  using AttemptKey = std::pair<Session, Attempt>;

  KeyEntry& entry_for(const TransferKey& key, TimeNs now);
  bool refuse_grant(const ConsumerPeer& peer, const GrantMessage& message, TimeNs now,
                    Actions& out);
  void join_attempt(KeyEntry& entry, const ConsumerPeer& peer, Attempt attempt, TimeNs now,
                    Actions& out);
  void end_offer(Ticket ticket, Reason reason, bool owner_is_done, TimeNs now, Actions& out);
  void give_up_key(const TransferKey& key, Reason reason, TimeNs now, Actions& out);
  void expire_serves(TimeNs now, Actions& out);
  void expire_entries(TimeNs now, Actions& out);
  void note_due(TimeNs time) noexcept { next_due_ = std::min(next_due_, time); }
  void pair(ServeId id, Serve& serve, Ticket offer, TimeNs now, Actions& out);
  void advance(ServeId id, TimeNs now, Actions& out);
  std::uint32_t post_limit(const Serve& serve, const Offer& offer) const;
  void begin_end(ServeId id, Reason reason, std::string detail, TimeNs now, Actions& out);
  void finish_serve(ServeId id, TimeNs now, Actions& out);
  // Pull.
  bool is_being_read(const Serve& serve) const noexcept {
    return config_.reads && serve.posts_in_flight != 0;
  }
  SendAction ready_message(const Serve& serve) const;
  void say_ready(Serve& serve, TimeNs now, Actions& out);
  void recall(Serve& serve, TimeNs now, Actions& out);
  void end_reads(ServeId id, TimeNs now, Actions& out);
  void tick_reads(TimeNs now, Actions& out);
  void settle_entry(const TransferKey& key, Actions& out);
  void finish_offer(Ticket ticket, Reason reason, std::string detail, Session culprit,
                    Actions& out);
  // `confirmed`: a READ_DONE that comes again is answered as the first one was.
  void add_tombstone(AttemptKey attempt, bool confirmed = false);

  ProducerConfig config_;
  ServeId next_serve_ = 1;
  std::unordered_map<ServeId, Serve> serves_;
  std::map<AttemptKey, ServeId> by_attempt_;
  std::unordered_map<Ticket, Offer> offers_;
  // Offers that ended before they were final: what their owner still adds is ignored.
  std::unordered_set<Ticket> ended_open_;
  std::unordered_map<TransferKey, KeyEntry, TransferKeyHash> keys_;
  std::map<AttemptKey, bool> tombstones_;  // to whether it was confirmed
  std::deque<AttemptKey> tombstone_order_;
  std::size_t granted_blocks_ = 0;
  // No timer runs out before this: ten thousand requests need not be looked at in every tick.
  TimeNs next_due_ = std::numeric_limits<TimeNs>::max();
};

}  // namespace kvpush
