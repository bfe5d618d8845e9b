// A consumer fed any sequence of commands and messages, beside a record of what every writer has
// said. Blocks must not go back while a writer may still write, nothing ends twice, and whatever
// the peers do, everything has ended once its times are over.
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
};

class ConsumerScript {
 public:
  void run(Input& in) {
    while (!in.empty()) {
      step(in);
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
  void step(Input& in) {
    switch (in.below(10)) {
      case 0:
      case 1:
        return grant(in);
      case 2:
        return consumer_.revoke(1 + in.below(16), Reason::kRevoked, now_, actions_);
      case 3: {
        const AcceptedMessage message{1 + in.below(6)};
        consumer_.on_accepted(writer(in), message, now_, actions_);
        return;
      }
      case 4:
        return failed(writer(in), arbitrary_failed(in));
      case 5:
        return revoked(writer(in), {1 + in.below(6)});
      case 6:
        return lose(writer(in), in.flag() ? now_ + kFence : now_);
      case 7: {
        static constexpr DurationNs kSteps[] = {kMillisecond, kSecond, 5 * kSecond, 70 * kSecond};
        now_ += kSteps[in.below(4)];
        return consumer_.on_tick(now_, actions_);
      }
      case 8:
        return raw(in);
      default:
        return written(writer(in), arbitrary_written(in));
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
    Given given{drawn.attempt, drawn.span, {}};
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
          KVPUSH_CHECK(send->to >= 1 && send->to <= kWriters, "only writers are spoken to");
        }
      }
    }
  }
  void check_end(const EndAction& end) {
    const auto found = given_.find(end.ticket);
    KVPUSH_CHECK(end.is_grant && found != given_.end(), "a grant ends once");
    KVPUSH_CHECK((end.end == End::kDone) == (end.reason == Reason::kNone), "an end has its reason");
    for (const auto& [session, said] : found->second.writers) {
      const bool covers = said.covers(found->second.span);
      const bool quiet = covers || said.ended || (said.fence != 0 && now_ >= said.fence);
      KVPUSH_CHECK(quiet, "blocks go back when no writer can write");
      KVPUSH_CHECK(end.end != End::kDone || covers, "received means all of it");
    }
    given_.erase(found);
  }

  Consumer consumer_{ConsumerConfig{}};
  Actions actions_;
  std::map<Ticket, Given> given_;
  Ticket next_ticket_ = 1;
  TimeNs now_ = kSecond;
};

}  // namespace
}  // namespace kvpush::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvpush::fuzz::Input in(data, size);
  kvpush::fuzz::ConsumerScript().run(in);
  return 0;
}
