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
      20 * kSecond;  // REVOKE unanswered for this long: the peer is dropped
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

  // The peer is lost; it may still write until `fence`. A peer that said GOODBYE writes no more:
  // then `fence` is `now`.
  void on_peer_lost(Session peer, TimeNs fence, TimeNs now, Actions& out);
  // Does nothing, at no cost, while nothing is due.
  void on_tick(TimeNs now, Actions& out);

  std::size_t live() const noexcept { return grants_.size(); }

 private:
  enum class WriterState : std::uint8_t { kGranted, kAccepted, kComplete, kEnded, kFenced, kGone };
  struct Writer {
    Session session = 0;
    WriterState state = WriterState::kGranted;
    Coverage coverage;
    TimeNs last_sent = 0;
    TimeNs fence = 0;
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
  };
  struct Found {
    Grant* grant = nullptr;
    Writer* writer = nullptr;
  };

  static bool may_write(const Writer& writer) noexcept;
  Found find(Session from, Attempt attempt);
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
  // No timer runs out before this: ten thousand grants need not be looked at in every tick.
  TimeNs next_due_ = std::numeric_limits<TimeNs>::max();
};

}  // namespace kvpush
