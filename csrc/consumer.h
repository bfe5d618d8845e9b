// Consumer: the state machine of the grants a consumer rank has given. Pure: see rendezvous.h.
//
// Theory of operation
//
// A grant names its writers: the producer ranks that hold what this rank needs. For each writer:
//
//   kGranted   GRANT sent, repeated until an answer comes
//   kAccepted  ACCEPTED or a first WRITTEN came
//   kComplete  what it has written covers the span: it will write no more
//   kEnded     it said FAILED or REVOKED: it will write no more
//   kFenced    its session is lost; it may still write until the fence time is over
//   kGone      the fence time is over
//
// and for the grant as a whole:
//
//   live     -> all writers kComplete                -> End::kDone
//   live     -> revoked, deadline, a writer failed   -> ending: REVOKE to every writer that may
//   write ending   -> every writer kComplete/kEnded/kGone  -> End::kRevoked or End::kFailed
//
// The end is reported once, and only when no writer can write any more (design, rule 2): from then
// on the blocks are the caller's again. The first reason for ending is the one reported. A writer
// that leaves REVOKE unanswered is dropped as a peer, which starts its fence: every wait is
// bounded.
//
// Pull (`ConsumerConfig::reads`): the "writers" hold KV that this rank READs. What changes:
//
//   kAccepted + READY        -> the READs are posted (`read` names them while one is in flight)
//   all READs ended well     -> kRead      READ_DONE said, repeated until an answer comes
//   kRead + CONFIRMED        -> kComplete  the producer held its blocks until READ_DONE came
//
// Nobody writes here, so a lost peer needs no fence: what may still touch this rank's blocks is its
// own READs. A grant ends only when they have ended (RMA can't be cancelled), and REVOKE, which
// then says "nothing of this attempt is being read", waits for them too. See consumer_pull.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "coverage.h"
#include "rendezvous.h"

namespace kvpush {

struct ConsumerConfig {
  DurationNs resend = 2 * kSecond;  // between repeats of GRANT and of REVOKE
  DurationNs revoke_patience =
      20 * kSecond;    // REVOKE unanswered for this long: the peer is dropped
  bool reads = false;  // pull: this rank READs, and nobody writes
  // vLLM runs some thousands of requests at most; a grant takes about 1 KB.
  std::size_t max_grants = 65'536;
};

struct GrantCommand {
  Ticket ticket = 0;
  Attempt attempt = 0;
  TransferKey key;
  TokenSpan span;
  BlockTable blocks;
  std::vector<Session> writers;
  TimeNs deadline = 0;
};

class Consumer {
 public:
  explicit Consumer(ConsumerConfig config) : config_(config) {}

  void grant(GrantCommand command, TimeNs now, Actions& out);
  void revoke(Ticket ticket, Reason reason, TimeNs now, Actions& out);
  void revoke_all(Reason reason, TimeNs now, Actions& out);

  // Messages from a connected peer. Those that fit no live grant are counted by the return value
  // (false) and have no effect.
  bool on_accepted(Session from, const AcceptedMessage& message, TimeNs now, Actions& out);
  bool on_written(Session from, const WrittenMessage& message, TimeNs now, Actions& out);
  bool on_failed(Session from, const FailedMessage& message, TimeNs now, Actions& out);
  bool on_revoked(Session from, const RevokedMessage& message, TimeNs now, Actions& out);

  // Pull.
  bool on_ready(Session from, ReadyMessage& message, TimeNs now, Actions& out);
  bool on_confirmed(Session from, const ConfirmedMessage& message, TimeNs now, Actions& out);
  bool on_recall(Session from, const RecallMessage& message, TimeNs now, Actions& out);
  // A ReadAction has ended: every handle made for it has. `reason` is kNone when all bytes are
  // here.
  void on_read_ended(ReadId read, Reason reason, std::string detail, const PostStats& stats,
                     TimeNs now, Actions& out);
  // Asked before each post of READs.
  bool may_read(ReadId read) const;
  // The grant that these READs are for; null once it has ended.
  const GrantCommand* grant_of(ReadId read) const;

  // The peer is lost; it may still write until `fence`. A peer that said GOODBYE writes no more:
  // then `fence` is `now`.
  void on_peer_lost(Session peer, TimeNs fence, TimeNs now, Actions& out);
  // Does nothing, at no cost, while nothing is due.
  void on_tick(TimeNs now, Actions& out);

  std::size_t live() const noexcept { return grants_.size(); }

 private:
  enum class WriterState : std::uint8_t {
    kGranted,
    kAccepted,
    kRead,
    kComplete,
    kEnded,
    kFenced,
    kGone
  };
  struct Writer {
    Session session = 0;
    WriterState state = WriterState::kGranted;
    Coverage coverage;
    TimeNs last_sent = 0;
    TimeNs fence = 0;
    ReadId read = 0;  // pull: READs from it are queued or in flight; 0: none
  };
  struct Grant {
    GrantCommand command;
    std::vector<Writer> writers;
    bool ending = false;
    End end = End::kDone;
    Reason reason = Reason::kNone;
    std::string detail;
    Session culprit = 0;
    TimeNs ending_since = 0;
    PostStats stats;  // pull
  };
  struct Found {
    Grant* grant = nullptr;
    Writer* writer = nullptr;
  };

  // It, or our READs from it, may still touch the grant's blocks, or an answer is owed.
  static bool is_open(const Writer& writer) noexcept;
  // It is there, and has not said its last word.
  static bool is_talking(const Writer& writer) noexcept;
  Found find(Session from, Attempt attempt);
  const Grant* find_read(ReadId read) const;
  void send_revoke(const Grant& grant, Writer& writer, TimeNs now, Actions& out);
  SendAction grant_message(const Grant& grant, Session to) const;
  void note_progress(Grant& grant, Writer& writer, Actions& out);
  void begin_end(Grant& grant, End end, Reason reason, std::string detail, Session culprit,
                 TimeNs now, Actions& out);
  void finish_if_quiet(Ticket ticket, Actions& out);
  void tick_writer(Grant& grant, Writer& writer, TimeNs now, Actions& out);
  void note_due(const Grant& grant, const Writer& writer);
  void note_due(TimeNs time) noexcept { next_due_ = std::min(next_due_, time); }

  ConsumerConfig config_;
  std::unordered_map<Ticket, Grant> grants_;
  std::unordered_map<Attempt, Ticket> by_attempt_;
  std::unordered_map<ReadId, Ticket> reads_;
  ReadId next_read_ = 1;
  // No timer runs out before this: ten thousand grants need not be looked at in every tick.
  TimeNs next_due_ = std::numeric_limits<TimeNs>::max();
};

}  // namespace kvpush
