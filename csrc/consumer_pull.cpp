// The consumer's part of pull: what READY, CONFIRMED, RECALL and the end of READs do.
#include <algorithm>
#include <utility>

#include "consumer.h"

namespace kvpush {

const Consumer::Grant* Consumer::find_read(ReadId read) const {
  const auto ticket = reads_.find(read);
  return ticket == reads_.end() ? nullptr : &grants_.at(ticket->second);
}

bool Consumer::may_read(ReadId read) const {
  const Grant* grant = find_read(read);
  return grant != nullptr && !grant->ending &&
         std::any_of(grant->writers.begin(), grant->writers.end(), [read](const Writer& writer) {
           return writer.read == read && writer.state == WriterState::kAccepted;
         });
}

const GrantCommand* Consumer::grant_of(ReadId read) const {
  const Grant* grant = find_read(read);
  return grant == nullptr ? nullptr : &grant->command;
}

bool Consumer::on_ready(Session from, ReadyMessage& message, TimeNs now, Actions& out) {
  const Found found = find(from, message.attempt);
  if (!config_.reads || found.writer == nullptr) {
    if (config_.reads) {
      // Nothing of it is read here, or will be: the producer need not hold its blocks.
      out.emplace_back(SendAction{from, RevokeMessage{message.attempt}});
    }
    return false;
  }
  Grant& grant = *found.grant;
  Writer& writer = *found.writer;
  const bool waits =
      writer.state == WriterState::kGranted || writer.state == WriterState::kAccepted;
  if (grant.ending || !waits || writer.read != 0) {
    return false;  // REVOKE is on its way, or READY came twice
  }
  writer.state = WriterState::kAccepted;
  if (message.watermark < grant.command.span.end) {
    begin_end(grant, End::kFailed, Reason::kProducerShort,
              "the producer holds " + std::to_string(message.watermark) + " tokens, " +
                  std::to_string(grant.command.span.end) + " are needed",
              from, now, out);
    return true;
  }
  writer.read = next_read_++;
  reads_.emplace(writer.read, grant.command.ticket);
  out.emplace_back(ReadAction{writer.read, from, std::move(message.blocks)});
  return true;
}

void Consumer::on_read_ended(ReadId read, Reason reason, std::string detail, const PostStats& stats,
                             TimeNs now, Actions& out) {
  const auto found = reads_.find(read);
  KVPUSH_CHECK(found != reads_.end(), "READs end once, before their grant does");
  const Ticket ticket = found->second;
  reads_.erase(found);
  Grant& grant = grants_.at(ticket);
  const auto writer = std::find_if(grant.writers.begin(), grant.writers.end(),
                                   [read](const Writer& w) { return w.read == read; });
  KVPUSH_CHECK(writer != grant.writers.end(), "a writer knows its READs");
  writer->read = 0;
  grant.stats.add(stats);
  if (grant.ending) {
    send_revoke(grant, *writer, now, out);  // it has waited for this
  } else if (reason != Reason::kNone) {
    begin_end(grant, End::kFailed, reason, std::move(detail), writer->session, now, out);
  } else if (is_talking(*writer)) {
    writer->state = WriterState::kRead;
    writer->last_sent = now;
    out.emplace_back(SendAction{writer->session, ReadDoneMessage{grant.command.attempt}});
    note_due(now + config_.resend);
  }
  finish_if_quiet(ticket, out);
}

bool Consumer::on_confirmed(Session from, const ConfirmedMessage& message, TimeNs /*now*/,
                            Actions& out) {
  const Found found = find(from, message.attempt);
  if (found.writer == nullptr || found.writer->state != WriterState::kRead) {
    return false;
  }
  found.writer->state = WriterState::kComplete;
  finish_if_quiet(found.grant->command.ticket, out);
  return true;
}

bool Consumer::on_recall(Session from, const RecallMessage& message, TimeNs now, Actions& out) {
  if (!config_.reads) {
    return false;
  }
  const Found found = find(from, message.attempt);
  if (found.writer == nullptr || !is_open(*found.writer)) {
    out.emplace_back(SendAction{from, RevokeMessage{message.attempt}});  // as in on_ready()
    return found.writer != nullptr;
  }
  begin_end(*found.grant, End::kFailed, message.reason, message.detail, from, now, out);
  return true;
}

}  // namespace kvpush
