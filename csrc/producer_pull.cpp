// The producer's part of pull: READY, READ_DONE, RECALL, and the time a lost consumer may still
// read for.
#include <utility>

#include "producer.h"

namespace kvpush {

SendAction Producer::ready_message(const Serve& serve) const {
  const Offer& offer = offers_.at(serve.offer);
  return {serve.session, ReadyMessage{serve.attempt, offer.watermark, offer.blocks}};
}

void Producer::say_ready(Serve& serve, TimeNs now, Actions& out) {
  out.emplace_back(ready_message(serve));
  // A consumer that is alive answers before its own deadline, which is earlier than this.
  serve.expires = now + config_.grant_ttl;
  note_due(serve.expires);
}

void Producer::recall(Serve& serve, TimeNs now, Actions& out) {
  out.emplace_back(
      SendAction{serve.session, RecallMessage{serve.attempt, serve.reason, serve.detail}});
  serve.last_recall = now;
  note_due(now + config_.resend);
}

// Nothing of this grant is being read any more. Where nothing had gone wrong till then, all of it
// was, from blocks that were held.
void Producer::end_reads(ServeId id, TimeNs now, Actions& out) {
  serves_.at(id).posts_in_flight = 0;
  finish_serve(id, now, out);
}

void Producer::on_read_done(Session from, const ReadDoneMessage& message, TimeNs now,
                            Actions& out) {
  if (!config_.reads) {
    return;
  }
  const AttemptKey attempt{from, message.attempt};
  const auto found = by_attempt_.find(attempt);
  if (found != by_attempt_.end()) {
    if (is_being_read(serves_.at(found->second))) {
      end_reads(found->second, now, out);
    }
    return;  // else it was never told READY
  }
  const auto ended = tombstones_.find(attempt);
  if (ended != tombstones_.end() && ended->second) {
    out.emplace_back(SendAction{from, ConfirmedMessage{message.attempt}});
  } else {
    add_tombstone(attempt);  // as in on_revoke(): it is told that nothing more comes
    out.emplace_back(SendAction{from, RevokedMessage{message.attempt}});
  }
}

void Producer::tick_reads(TimeNs now, Actions& out) {
  std::vector<ServeId> fenced;
  std::vector<ServeId> overdue;
  for (auto& [id, serve] : serves_) {
    if (!is_being_read(serve)) {
      continue;
    }
    if (serve.peer_gone) {
      now >= serve.fence ? fenced.push_back(id) : note_due(serve.fence);
    } else if (serve.state != ServeState::kEnding) {
      now >= serve.expires ? overdue.push_back(id) : note_due(serve.expires);
    } else if (now - serve.recalled >= config_.recall_patience) {
      out.emplace_back(DropPeerAction{serve.session, "it left a RECALL unanswered"});
    } else if (now - serve.last_recall >= config_.resend) {
      recall(serve, now, out);
    } else {
      note_due(
          std::min(serve.last_recall + config_.resend, serve.recalled + config_.recall_patience));
    }
  }
  for (const ServeId id : fenced) {
    end_reads(id, now, out);
  }
  for (const ServeId id : overdue) {
    begin_end(id, Reason::kOfferExpired, "the consumer did not finish its READs in time", now, out);
  }
}

}  // namespace kvpush
