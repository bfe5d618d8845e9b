#include "consumer.h"

#include <algorithm>
#include <utility>

namespace kvpush {

namespace {

EndAction refused(const GrantCommand& command, Reason reason, std::string detail) {
  EndAction end;
  end.ticket = command.ticket;
  end.is_grant = true;
  end.end = End::kFailed;
  end.reason = reason;
  end.detail = std::move(detail);
  return end;
}

// What a GRANT can't carry, or what would wait for ever: "" if the command is sound.
std::string fault_of(const GrantCommand& command) {
  std::size_t blocks = 0;
  for (const GroupBlocks& group : command.blocks) {
    blocks += group.ids.size();
    if (group.first_block > kMaxBlocksPerGrant) {
      return "the first block is number " + std::to_string(group.first_block);
    }
  }
  if (blocks > kMaxBlocksPerGrant || command.blocks.size() > kMaxGroups) {
    return std::to_string(blocks) + " blocks in " + std::to_string(command.blocks.size()) +
           " groups are more than a grant may have";
  }
  if (command.key.transfer_id.size() > kMaxTransferIdBytes) {
    return "the transfer id is longer than " + std::to_string(kMaxTransferIdBytes) + " bytes";
  }
  if (command.span.end < command.span.begin || command.attempt == 0) {
    return "the span ends before it begins, or the attempt is zero";
  }
  std::vector<Session> writers = command.writers;
  std::sort(writers.begin(), writers.end());
  if (std::adjacent_find(writers.begin(), writers.end()) != writers.end()) {
    return "a writer is named twice";
  }
  return {};
}

}  // namespace

bool Consumer::is_talking(const Writer& writer) noexcept {
  return writer.state == WriterState::kGranted || writer.state == WriterState::kAccepted ||
         writer.state == WriterState::kRead;
}

bool Consumer::is_open(const Writer& writer) noexcept {
  return is_talking(writer) || writer.state == WriterState::kFenced || writer.read != 0;
}

Consumer::Found Consumer::find(Session from, Attempt attempt) {
  const auto ticket = by_attempt_.find(attempt);
  if (ticket == by_attempt_.end()) {
    return {};
  }
  Grant& grant = grants_.at(ticket->second);
  for (Writer& writer : grant.writers) {
    if (writer.session == from) {
      return {&grant, &writer};
    }
  }
  return {};
}

SendAction Consumer::grant_message(const Grant& grant, Session to) const {
  GrantMessage message;
  message.attempt = grant.command.attempt;
  message.key = grant.command.key;
  message.span = grant.command.span;
  if (!config_.reads) {  // else they are nobody's business
    message.blocks = grant.command.blocks;
  }
  return {to, std::move(message)};
}

void Consumer::grant(GrantCommand command, TimeNs now, Actions& out) {
  KVPUSH_CHECK(!grants_.contains(command.ticket), "a ticket may be granted once");
  if (by_attempt_.contains(command.attempt)) {
    out.emplace_back(refused(command, Reason::kBadRequest, "this attempt number is in use"));
    return;
  }
  if (std::string fault = fault_of(command); !fault.empty()) {
    out.emplace_back(refused(command, Reason::kBadRequest, std::move(fault)));
    return;
  }
  if (grants_.size() >= config_.max_grants) {
    out.emplace_back(refused(command, Reason::kTableFull,
                             std::to_string(grants_.size()) + " grants are live already"));
    return;
  }
  Grant grant;
  for (const Session session : command.writers) {
    Writer writer;
    writer.session = session;
    writer.last_sent = now;
    grant.writers.push_back(std::move(writer));
  }
  grant.command = std::move(command);
  const Ticket ticket = grant.command.ticket;
  by_attempt_.emplace(grant.command.attempt, ticket);
  for (const Writer& writer : grant.writers) {
    out.emplace_back(grant_message(grant, writer.session));
  }
  note_due(std::min(grant.command.deadline, now + config_.resend));
  grants_.emplace(ticket, std::move(grant));
  finish_if_quiet(ticket, out);  // no writers: this rank needs nothing
}

void Consumer::revoke(Ticket ticket, Reason reason, TimeNs now, Actions& out) {
  const auto found = grants_.find(ticket);
  if (found == grants_.end()) {
    return;  // it has ended, and its end was reported
  }
  begin_end(found->second, End::kRevoked, reason, {}, 0, now, out);
  finish_if_quiet(ticket, out);
}

void Consumer::revoke_all(Reason reason, TimeNs now, Actions& out) {
  std::vector<Ticket> tickets;
  for (const auto& [ticket, grant] : grants_) {
    tickets.push_back(ticket);
  }
  for (const Ticket ticket : tickets) {
    revoke(ticket, reason, now, out);
  }
}

void Consumer::note_progress(Grant& grant, Writer& writer, Actions& out) {
  if (writer.state == WriterState::kGranted) {
    writer.state = WriterState::kAccepted;
  }
  const bool covered = config_.reads ? grant.command.span.empty()  // nothing is needed
                                     : writer.coverage.covers(grant.command.span);
  if (writer.state == WriterState::kAccepted && covered) {
    writer.state = WriterState::kComplete;
    finish_if_quiet(grant.command.ticket, out);
  }
}

bool Consumer::on_accepted(Session from, const AcceptedMessage& message, TimeNs /*now*/,
                           Actions& out) {
  const Found found = find(from, message.attempt);
  if (found.writer == nullptr) {
    return false;
  }
  note_progress(*found.grant, *found.writer, out);
  return true;
}

bool Consumer::on_written(Session from, const WrittenMessage& message, TimeNs /*now*/,
                          Actions& out) {
  const Found found = find(from, message.attempt);
  if (found.writer == nullptr || config_.reads ||
      !found.grant->command.span.contains(message.span) || !found.writer->coverage.add(message)) {
    return false;
  }
  note_progress(*found.grant, *found.writer, out);
  return true;
}

bool Consumer::on_failed(Session from, const FailedMessage& message, TimeNs now, Actions& out) {
  const Found found = find(from, message.attempt);
  if (found.writer == nullptr || !is_open(*found.writer)) {
    return false;
  }
  found.writer->state = WriterState::kEnded;
  const Ticket ticket = found.grant->command.ticket;
  begin_end(*found.grant, End::kFailed, message.reason, message.detail, from, now, out);
  finish_if_quiet(ticket, out);
  return true;
}

bool Consumer::on_revoked(Session from, const RevokedMessage& message, TimeNs now, Actions& out) {
  const Found found = find(from, message.attempt);
  if (found.writer == nullptr || !is_open(*found.writer)) {
    return false;
  }
  found.writer->state = WriterState::kEnded;
  const Ticket ticket = found.grant->command.ticket;
  // Unasked, it says that the producer knows nothing of this grant any more: it can't complete.
  begin_end(*found.grant, End::kFailed, Reason::kPeerLost,
            "the producer no longer knows this transfer", from, now, out);
  finish_if_quiet(ticket, out);
  return true;
}

void Consumer::begin_end(Grant& grant, End end, Reason reason, std::string detail, Session culprit,
                         TimeNs now, Actions& out) {
  if (grant.ending) {
    return;
  }
  grant.ending = true;
  grant.end = end;
  grant.reason = reason;
  grant.detail = std::move(detail);
  grant.culprit = culprit;
  grant.ending_since = now;
  note_due(now + std::min(config_.resend, config_.revoke_patience));
  for (Writer& writer : grant.writers) {
    send_revoke(grant, writer, now, out);
  }
}

void Consumer::send_revoke(const Grant& grant, Writer& writer, TimeNs now, Actions& out) {
  if (is_talking(writer) && writer.read == 0) {
    out.emplace_back(SendAction{writer.session, RevokeMessage{grant.command.attempt}});
    writer.last_sent = now;
    note_due(now + config_.resend);
  }
}

void Consumer::finish_if_quiet(Ticket ticket, Actions& out) {
  const auto found = grants_.find(ticket);
  if (found == grants_.end()) {
    return;
  }
  Grant& grant = found->second;
  if (std::any_of(grant.writers.begin(), grant.writers.end(), is_open)) {
    return;
  }
  EndAction end;
  end.ticket = ticket;
  end.is_grant = true;
  end.end = grant.ending ? grant.end : End::kDone;
  end.reason = grant.reason;
  end.detail = std::move(grant.detail);
  end.peer = grant.culprit;
  end.stats = grant.stats;
  by_attempt_.erase(grant.command.attempt);
  grants_.erase(found);
  out.emplace_back(std::move(end));
}

void Consumer::on_peer_lost(Session peer, TimeNs fence, TimeNs now, Actions& out) {
  std::vector<Ticket> touched;
  for (auto& [ticket, grant] : grants_) {
    for (Writer& writer : grant.writers) {
      if (writer.session == peer && is_talking(writer)) {
        const bool may_write = !config_.reads && fence > now;
        writer.state = may_write ? WriterState::kFenced : WriterState::kGone;
        writer.fence = fence;
        note_due(fence);
        begin_end(grant, End::kFailed, Reason::kPeerLost, "the producer is gone", peer, now, out);
        touched.push_back(ticket);
      }
    }
  }
  for (const Ticket ticket : touched) {
    finish_if_quiet(ticket, out);
  }
}

void Consumer::tick_writer(Grant& grant, Writer& writer, TimeNs now, Actions& out) {
  if (writer.state == WriterState::kFenced) {
    if (now >= writer.fence) {
      writer.state = WriterState::kGone;
    }
    return;
  }
  if (!is_talking(writer)) {
    return;
  }
  if (grant.ending && now - grant.ending_since >= config_.revoke_patience) {
    out.emplace_back(DropPeerAction{writer.session, "it left a REVOKE unanswered"});
    return;
  }
  if (now - writer.last_sent < config_.resend) {
    return;
  }
  if (grant.ending) {
    send_revoke(grant, writer, now, out);
  } else if (writer.state == WriterState::kGranted) {
    out.emplace_back(grant_message(grant, writer.session));
    writer.last_sent = now;
  } else if (writer.state == WriterState::kRead) {
    out.emplace_back(SendAction{writer.session, ReadDoneMessage{grant.command.attempt}});
    writer.last_sent = now;
  }
}

// Notes when this writer, as it now is, needs to be looked at again.
void Consumer::note_due(const Grant& grant, const Writer& writer) {
  if (writer.state == WriterState::kFenced) {
    note_due(writer.fence);
  } else if (is_talking(writer)) {
    if (grant.ending) {
      note_due(grant.ending_since + config_.revoke_patience);
    }
    const bool repeats =
        writer.state == WriterState::kGranted || writer.state == WriterState::kRead || grant.ending;
    if (repeats && writer.read == 0) {  // REVOKE waits for the READs
      note_due(writer.last_sent + config_.resend);
    }
  }
}

void Consumer::on_tick(TimeNs now, Actions& out) {
  if (now < next_due_) {
    return;
  }
  next_due_ = std::numeric_limits<TimeNs>::max();
  std::vector<Ticket> tickets;
  tickets.reserve(grants_.size());
  for (auto& [ticket, grant] : grants_) {
    tickets.push_back(ticket);
  }
  for (const Ticket ticket : tickets) {
    Grant& grant = grants_.at(ticket);
    if (now >= grant.command.deadline) {
      begin_end(grant, End::kFailed, Reason::kDeadline, "the KV did not come before the deadline",
                0, now, out);
    }
    for (Writer& writer : grant.writers) {
      tick_writer(grant, writer, now, out);
      note_due(grant, writer);
    }
    if (!grant.ending) {
      note_due(grant.command.deadline);
    }
    finish_if_quiet(ticket, out);
  }
}

}  // namespace kvpush
