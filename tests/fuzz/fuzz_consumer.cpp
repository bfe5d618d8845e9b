// A consumer fed any sequence of commands and messages, beside a record of what every writer has
// said. Blocks must not go back while a writer may still write, nothing ends twice, and whatever
// the peers do, everything has ended once its times are over. The first byte picks the mode: in
// pull, blocks must not go back while a READ into them is in flight, nobody is told that a READ is
// over while one is, and received means read, told and confirmed.
#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "arbitrary.h"
#include "consumer.h"

namespace kvpush::fuzz {
namespace {

constexpr Session kWriters = 3;  // sessions 1 to 3
constexpr DurationNs kFence = 12 * kSecond;
constexpr DurationNs kDeadline = 60 * kSecond;

// What one writer of a grant has said.
struct Said {
  std::map<std::pair<TokenSpan, std::uint32_t>, std::set<std::uint32_t>> parts;
  bool ended = false;
  TimeNs fence = 0;  // 0: not lost
  // Pull.
  bool accepted = false;
  bool read = false;  // its READs have ended well
  bool done = false;  // it was told READ_DONE
  bool confirmed = false;

  bool covers(TokenSpan span) const {
    for (std::uint32_t token = span.begin; token < span.end; ++token) {
      bool written = false;
      for (const auto& [piece, seen] : parts) {
        written = written || (seen.size() == piece.second && piece.first.begin <= token &&
                              token < piece.first.end);
      }
      if (!written) {
        return false;
      }
    }
    return true;
  }
};
struct Given {
  Attempt attempt = 0;
  TokenSpan span;
  std::map<Session, Said> writers;
  bool given_up = false;  // REVOKE was said to a writer that had not done its part

  bool has_all(const Said& said) const {  // pull
    return said.confirmed || (span.empty() && said.accepted);
  }
};
// Pull: READs in flight.
struct Reads {
  ReadId id = 0;
  Ticket ticket = 0;
  Session from = 0;
};

class ConsumerScript {
 public:
  explicit ConsumerScript(bool pull) : pull_(pull), consumer_(config(pull)) {}

  void run(Input& in) {
    while (!in.empty()) {
      step(in);
      carry_out();
      check_reads();
    }
    while (!reads_.empty()) {
      end_reads(0, Reason::kNone);
      carry_out();
    }
    for (int i = 0; i < 400 && consumer_.live() != 0; ++i) {
      now_ += kSecond;
      consumer_.on_tick(now_, actions_);
      carry_out();
    }
    KVPUSH_CHECK(consumer_.live() == 0 && given_.empty(), "every grant ends");
  }

 private:
  static ConsumerConfig config(bool pull) {
    ConsumerConfig config;
    config.reads = pull;
    return config;
  }

  void step(Input& in) {
    switch (in.below(16)) {
      case 0:
      case 1:
        return grant(in);
      case 2:
        return consumer_.revoke(1 + in.below(16), Reason::kRevoked, now_, actions_);
      case 3: {
        const AcceptedMessage message{arbitrary_attempt(in)};
        return accepted(writer(in), message);
      }
      case 4: {
        const Session from = writer(in);
        return failed(from, arbitrary_failed(in));
      }
      case 5: {
        const Session from = writer(in);
        return revoked(from, {1 + in.below(6)});
      }
      case 6: {
        const Session from = writer(in);
        return lose(from, in.flag() ? now_ + kFence : now_);
      }
      case 7: {
        static constexpr DurationNs kSteps[] = {kMillisecond, kSecond, 5 * kSecond, 70 * kSecond};
        now_ += kSteps[in.below(4)];
        return consumer_.on_tick(now_, actions_);
      }
      case 8:
        return raw(in);
      case 10:
      case 11: {
        ReadyMessage message = arbitrary_ready(in);
        return ready(writer(in), message);
      }
      case 12: {
        const ConfirmedMessage message{arbitrary_attempt(in)};
        return confirmed(writer(in), message);
      }
      case 13: {
        const Session from = writer(in);
        return recall(from, arbitrary_recall(in));
      }
      case 14:
      case 15:
        if (!reads_.empty()) {
          const std::size_t which = in.byte() % reads_.size();
          end_reads(which, in.below(4) == 0 ? Reason::kTransportError : Reason::kNone);
        }
        return;
      default: {
        const Session from = writer(in);
        return written(from, arbitrary_written(in));
      }
    }
  }
  static Session writer(Input& in) { return 1 + in.below(kWriters + 1); }  // or a stranger

  void grant(Input& in) {
    const GrantMessage drawn = arbitrary_grant(in);
    GrantCommand command;
    command.ticket = next_ticket_++;
    command.attempt = drawn.attempt;
    command.key = drawn.key;
    command.span = drawn.span;
    command.blocks = drawn.blocks;
    command.deadline = now_ + kDeadline;
    const std::uint32_t mask = in.below(1U << kWriters);
    Given given;
    given.attempt = drawn.attempt;
    given.span = drawn.span;
    for (Session session = 1; session <= kWriters; ++session) {
      if ((mask >> (session - 1) & 1U) != 0) {
        command.writers.push_back(session);
        given.writers[session] = {};
      }
    }
    const bool taken = by_attempt(drawn.attempt) != nullptr;
    if (taken) {
      given.writers.clear();  // refused: nobody is told of it
      given.attempt = 0;
    }
    given_[command.ticket] = std::move(given);
    consumer_.grant(std::move(command), now_, actions_);
  }
  Given* by_attempt(Attempt attempt) {
    for (auto& [ticket, given] : given_) {
      if (given.attempt == attempt) {
        return &given;
      }
    }
    return nullptr;
  }
  Said* said_by(Session from, Attempt attempt) {
    Given* given = by_attempt(attempt);
    if (given == nullptr) {
      return nullptr;
    }
    const auto found = given->writers.find(from);
    return found == given->writers.end() ? nullptr : &found->second;
  }

  void written(Session from, const WrittenMessage& message) {
    Said* said = said_by(from, message.attempt);
    if (said != nullptr) {
      said->parts[{message.span, message.parts}].insert(message.part);
    }
    const bool used = consumer_.on_written(from, message, now_, actions_);
    KVPUSH_CHECK(!used || said != nullptr, "a message of no grant has no effect");
  }
  void accepted(Session from, const AcceptedMessage& message) {
    if (Said* said = said_by(from, message.attempt)) {
      said->accepted = true;
    }
    consumer_.on_accepted(from, message, now_, actions_);
  }
  void ready(Session from, ReadyMessage message) {
    const bool known = said_by(from, message.attempt) != nullptr;
    const bool used = consumer_.on_ready(from, message, now_, actions_);
    KVPUSH_CHECK(!used || (pull_ && known), "READY of no grant has no effect");
  }
  void confirmed(Session from, const ConfirmedMessage& message) {
    Said* said = said_by(from, message.attempt);
    const bool asked = said != nullptr && said->done;
    if (asked) {
      said->confirmed = true;
    }
    const bool used = consumer_.on_confirmed(from, message, now_, actions_);
    KVPUSH_CHECK(!used || asked, "CONFIRMED is the answer to READ_DONE");
  }
  void recall(Session from, const RecallMessage& message) {
    const bool used = consumer_.on_recall(from, message, now_, actions_);
    KVPUSH_CHECK(!used || (pull_ && said_by(from, message.attempt) != nullptr),
                 "RECALL of no grant has no effect");
  }
  void end_reads(std::size_t which, Reason reason) {
    const Reads reads = reads_[which];
    reads_.erase(reads_.begin() + static_cast<std::ptrdiff_t>(which));
    given_.at(reads.ticket).writers.at(reads.from).read = reason == Reason::kNone;
    consumer_.on_read_ended(reads.id, reason, {}, {}, now_, actions_);
  }
  void failed(Session from, const FailedMessage& message) {
    if (Said* said = said_by(from, message.attempt)) {
      said->ended = true;
    }
    consumer_.on_failed(from, message, now_, actions_);
  }
  void revoked(Session from, RevokedMessage message) {
    if (Said* said = said_by(from, message.attempt)) {
      said->ended = true;
    }
    consumer_.on_revoked(from, message, now_, actions_);
  }
  void lose(Session peer, TimeNs fence) {
    for (auto& [ticket, given] : given_) {
      const auto found = given.writers.find(peer);
      if (found != given.writers.end() && found->second.fence == 0) {
        found->second.fence = fence;
      }
    }
    consumer_.on_peer_lost(peer, fence, now_, actions_);
  }
  // Whatever the parser lets through.
  void raw(Input& in) {
    const Session from = writer(in);
    const Result<Message> parsed = parse_message(in.bytes(in.byte()));
    if (!parsed.is_ok()) {
      return;
    }
    const MessageBody& body = parsed.value().body;
    if (const auto* m = std::get_if<WrittenMessage>(&body)) {
      // The record keeps a set for each part: only as much as it can hold.
      if (m->span.end <= 1'024 && m->parts <= 1'024) {
        written(from, *m);
      }
    } else if (const auto* f = std::get_if<FailedMessage>(&body)) {
      failed(from, *f);
    } else if (const auto* r = std::get_if<RevokedMessage>(&body)) {
      revoked(from, *r);
    } else if (const auto* a = std::get_if<AcceptedMessage>(&body)) {
      accepted(from, *a);
    } else if (const auto* y = std::get_if<ReadyMessage>(&body)) {
      ready(from, *y);
    } else if (const auto* c = std::get_if<ConfirmedMessage>(&body)) {
      confirmed(from, *c);
    } else if (const auto* l = std::get_if<RecallMessage>(&body)) {
      recall(from, *l);
    }
  }

  void carry_out() {
    while (!actions_.empty()) {
      const Actions actions = std::exchange(actions_, {});
      for (const Action& action : actions) {
        if (const auto* end = std::get_if<EndAction>(&action)) {
          check_end(*end);
        } else if (const auto* drop = std::get_if<DropPeerAction>(&action)) {
          lose(drop->peer, now_ + kFence);
        } else if (const auto* send = std::get_if<SendAction>(&action)) {
          check_sent(*send);
        } else if (const auto* read = std::get_if<ReadAction>(&action)) {
          begin_reads(*read);
        }
      }
    }
  }
  void begin_reads(const ReadAction& action) {
    const GrantCommand* grant = consumer_.grant_of(action.read);
    KVPUSH_CHECK(pull_ && grant != nullptr, "READs have their grant");
    const Given& given = given_.at(grant->ticket);
    KVPUSH_CHECK(given.writers.contains(action.from), "READs are from a writer");
    KVPUSH_CHECK(!given.given_up && !given.writers.at(action.from).done,
                 "nothing is read after its end was told");
    KVPUSH_CHECK(!is_reading(grant->ticket, action.from), "READs from one writer are made once");
    reads_.push_back({action.read, grant->ticket, action.from});
  }
  bool is_reading(Ticket ticket, Session from) const {
    return std::any_of(reads_.begin(), reads_.end(), [&](const Reads& reads) {
      return reads.ticket == ticket && reads.from == from;
    });
  }
  // What is queued may be posted later: so this is asked between any two events.
  void check_reads() const {
    for (const Reads& reads : reads_) {
      KVPUSH_CHECK(consumer_.grant_of(reads.id) != nullptr, "a grant outlives its READs");
      const Given& given = given_.at(reads.ticket);
      const Said& said = given.writers.at(reads.from);
      KVPUSH_CHECK(
          !consumer_.may_read(reads.id) || !(given.given_up || said.ended || said.fence != 0),
          "nothing is posted for a grant that is given up");
    }
  }
  void check_sent(const SendAction& send) {
    const auto* revoke = std::get_if<RevokeMessage>(&send.body);
    KVPUSH_CHECK((send.to >= 1 && send.to <= kWriters) || (pull_ && revoke != nullptr),
                 "only writers are spoken to, or told that they are none");
    if (const auto* grant = std::get_if<GrantMessage>(&send.body)) {
      KVPUSH_CHECK(!pull_ || grant->blocks.empty(), "in pull a grant names no blocks");
    } else if (const auto* done = std::get_if<ReadDoneMessage>(&send.body)) {
      Said* said = said_by(send.to, done->attempt);
      KVPUSH_CHECK(said != nullptr && said->read, "READ_DONE means read");
      said->done = true;
      check_not_reading(send.to, done->attempt);
    } else if (revoke != nullptr) {
      const Said* said = said_by(send.to, revoke->attempt);
      Given* given = by_attempt(revoke->attempt);
      if (said != nullptr && !given->has_all(*said)) {
        given->given_up = true;
      }
      check_not_reading(send.to, revoke->attempt);
    }
  }
  void check_not_reading(Session to, Attempt attempt) const {
    for (const Reads& reads : reads_) {
      KVPUSH_CHECK(reads.from != to || given_.at(reads.ticket).attempt != attempt,
                   "READ_DONE and REVOKE promise that nothing is being read");
    }
  }
  void check_end(const EndAction& end) {
    const auto found = given_.find(end.ticket);
    KVPUSH_CHECK(end.is_grant && found != given_.end(), "a grant ends once");
    KVPUSH_CHECK((end.end == End::kDone) == (end.reason == Reason::kNone), "an end has its reason");
    for (const auto& [session, said] : found->second.writers) {
      KVPUSH_CHECK(!is_reading(end.ticket, session),
                   "blocks go back when nothing is read into them");
      const TokenSpan span = found->second.span;
      const bool has_all = pull_ ? found->second.has_all(said) : said.covers(span);
      const TimeNs fence = pull_ ? 0 : said.fence;
      const bool quiet = has_all || said.ended || (said.fence != 0 && now_ >= fence);
      KVPUSH_CHECK(quiet, "blocks go back when no writer can write");
      KVPUSH_CHECK(end.end != End::kDone || has_all, "received means all of it");
    }
    given_.erase(found);
  }

  bool pull_;
  Consumer consumer_;
  Actions actions_;
  std::map<Ticket, Given> given_;
  std::vector<Reads> reads_;
  Ticket next_ticket_ = 1;
  TimeNs now_ = kSecond;
};

}  // namespace
}  // namespace kvpush::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvpush::fuzz::Input in(data, size);
  kvpush::fuzz::ConsumerScript(in.flag()).run(in);
  return 0;
}
