// A producer fed any sequence of offers, grants and ends of posts, beside a record of what is in
// flight. Nothing is posted after a promise to write no more, no such promise is made while a post
// is in flight, no offer ends while a post reads from it, and at the end the tables are empty. An
// offer that is rewound is offered anew only when nothing of it is in flight, and no consumer has
// all it granted while some of it is from before. The first byte picks the mode: in pull, a
// consumer that was told READY may be reading until it says otherwise or its fence is over.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "arbitrary.h"
#include "producer.h"

namespace kvpush::fuzz {
namespace {

constexpr Session kConsumers = 3;  // sessions 1 to 3; 1 and 2 are ranks of one engine
constexpr std::uint32_t kGranule = 4;
constexpr DurationNs kFence = 12 * kSecond;
constexpr std::size_t kTokens = 40;  // more than any watermark

using AttemptKey = std::pair<Session, Attempt>;

struct Post {
  ServeId serve = 0;
  AttemptKey attempt;
  TokenSpan span;
  Ticket offer = 0;
};
// Pull: a consumer that was told READY.
struct Reader {
  AttemptKey attempt;
  Ticket offer = 0;
  TimeNs fence = 0;  // 0: not lost
};
struct Made {
  TransferKey key;
  std::uint32_t watermark = 0;
  bool final = false;
  std::uint32_t life = 1;     // one more for each time its blocks were given to something else
  bool needs_blocks = false;  // those that it had are gone
};
// What a consumer was told is written, and in which of the offer's lives that was.
using Told = std::array<std::uint32_t, kTokens>;

class ProducerScript {
 public:
  explicit ProducerScript(bool pull) : pull_(pull), producer_(config(pull)) {}

  void run(Input& in) {
    while (!in.empty()) {
      step(in);
      carry_out();
      settle_rewinds();
    }
    producer_.withdraw_all(Reason::kShutdown, now_, actions_);
    carry_out();
    for (int i = 0; i < 100 && !(posts_.empty() && producer_.keys() == 0); ++i) {
      if (!posts_.empty()) {
        end_post(0, Reason::kNone);
        carry_out();
        --i;
        continue;
      }
      now_ += 60 * kSecond;
      producer_.on_tick(now_, actions_);
      carry_out();
    }
    KVPUSH_CHECK(producer_.live_serves() == 0, "every grant ends");
    KVPUSH_CHECK(producer_.live_offers() == 0 && made_.empty(), "every offer ends");
    KVPUSH_CHECK(producer_.keys() == 0, "keys are forgotten");
  }

 private:
  static ProducerConfig config(bool pull) {
    ProducerConfig config;
    config.reads = pull;
    config.granularity_tokens = kGranule;
    return config;
  }

  void step(Input& in) {
    switch (in.below(14)) {
      case 0:
        return producer_.offer(new_offer(in), now_, actions_);
      case 1:
        return grow(in);
      case 2:
        return withdraw(in);
      case 3: {
        const TransferKey key = arbitrary_key(in);
        return producer_.fail_key(key, Reason::kProducerAborted, now_, actions_);
      }
      case 4:
        return producer_.refuse(new_offer(in), Reason::kTransportError, now_, actions_);
      case 5: {
        const Session from = consumer(in);
        return revoke(from, {1 + in.below(6)});
      }
      case 6: {
        const Session peer = consumer(in);
        return lose(peer, in.flag() ? now_ + kFence : now_);
      }
      case 7: {
        static constexpr DurationNs kSteps[] = {kMillisecond, 6 * kSecond, 125 * kSecond,
                                                250 * kSecond};
        now_ += kSteps[in.below(4)];
        return producer_.on_tick(now_, actions_);
      }
      case 8:
      case 9:
        return pull_ ? end_read(in) : end_post(in);
      case 10:
        return raw(in);
      case 11:
        return rewind(in);
      case 12: {
        const Session from = consumer(in);
        return read_done(from, {arbitrary_attempt(in)});
      }
      default: {
        const Session from = consumer(in);
        GrantMessage message = arbitrary_grant(in);
        return grant(from, std::move(message), in.below(4));
      }
    }
  }
  static Session consumer(Input& in) { return 1 + in.below(kConsumers); }

  OfferCommand new_offer(Input& in) {
    OfferCommand command;
    command.ticket = next_ticket_++;
    command.key = arbitrary_key(in);
    command.watermark = in.below(33);
    command.final = in.flag();
    // Block ids tell the offer that a post reads from.
    command.new_blocks = {GroupBlocks{0, {static_cast<BlockId>(command.ticket)}}};
    made_[command.ticket] = {command.key, command.watermark, command.final};
    owned_[command.ticket] = command.key;
    if (command.final) {
      owned_.erase(command.ticket);
    }
    return command;
  }
  // Adds to an offer that its owner has not finished; it may have ended here.
  void grow(Input& in) {
    if (owned_.empty()) {
      return;
    }
    auto owned = std::next(owned_.begin(), in.byte() % static_cast<int>(owned_.size()));
    if (rewinding_.contains(owned->first)) {
      return;  // nothing is known of its new blocks yet
    }
    OfferCommand command;
    command.ticket = owned->first;
    command.key = owned->second;
    command.watermark = in.below(33);
    command.final = in.flag();
    command.new_blocks = arbitrary_blocks(in);
    if (const auto made = made_.find(command.ticket); made != made_.end()) {
      if (std::exchange(made->second.needs_blocks, false)) {
        command.new_blocks = {GroupBlocks{0, {static_cast<BlockId>(command.ticket)}}};
      }
      made->second.watermark = std::max(made->second.watermark, command.watermark);
      made->second.final = made->second.final || command.final;
    }
    if (command.final) {
      owned_.erase(owned);
    }
    producer_.offer(std::move(command), now_, actions_);
  }
  void withdraw(Input& in) {
    const Ticket ticket = 1 + in.below(32);
    owned_.erase(ticket);
    producer_.withdraw(ticket, Reason::kProducerAborted, now_, actions_);
  }
  // The prefill is preempted: its owner lets nothing overwrite its blocks before the rewind is
  // settled, and offers anew only then.
  void rewind(Input& in) {
    if (made_.empty()) {
      return;
    }
    const auto made = std::next(made_.begin(), in.byte() % static_cast<int>(made_.size()));
    if (producer_.rewind(made->first)) {
      made->second.watermark = 0;
      made->second.final = false;
      rewinding_.insert(made->first);
    }
  }
  void settle_rewinds() {
    for (auto next = rewinding_.begin(); next != rewinding_.end();) {
      const Ticket ticket = *next;
      if (producer_.writes_in_flight(ticket)) {
        ++next;
        continue;
      }
      next = rewinding_.erase(next);
      check_unread(ticket);
      if (producer_.rewind(ticket)) {
        Made& made = made_.at(ticket);
        ++made.life;
        made.needs_blocks = true;
        owned_[ticket] = made.key;
      }
    }
  }
  void grant(Session from, GrantMessage message, std::uint32_t fan_out) {
    const ConsumerPeer peer{from, from < kConsumers ? "ranks" : "other", fan_out};
    spans_.try_emplace({from, message.attempt}, message.span);
    producer_.on_grant(peer, std::move(message), now_, actions_);
  }
  void revoke(Session from, const RevokeMessage& message) {
    forget_reader({from, message.attempt});
    producer_.on_revoke(from, message, now_, actions_);
  }
  void read_done(Session from, const ReadDoneMessage& message) {
    const AttemptKey attempt{from, message.attempt};
    for (const Reader& reader : readers_) {
      if (reader.attempt == attempt && may_read(reader) && made_.contains(reader.offer)) {
        held_.insert(attempt);
      }
    }
    forget_reader(attempt);
    producer_.on_read_done(from, message, now_, actions_);
  }
  void forget_reader(const AttemptKey& attempt) {
    std::erase_if(readers_, [&](const Reader& reader) { return reader.attempt == attempt; });
  }
  bool may_read(const Reader& reader) const { return reader.fence == 0 || now_ < reader.fence; }
  void lose(Session peer, TimeNs fence) {
    for (Reader& reader : readers_) {
      if (reader.attempt.first == peer && reader.fence == 0) {
        reader.fence = fence;
      }
    }
    producer_.on_peer_lost(peer, fence, now_, actions_);
  }
  void raw(Input& in) {
    const Session from = consumer(in);
    Result<Message> parsed = parse_message(in.bytes(in.byte()));
    if (!parsed.is_ok()) {
      return;
    }
    if (auto* message = std::get_if<GrantMessage>(&parsed.value().body)) {
      grant(from, std::move(*message), 1);
    } else if (const auto* end = std::get_if<RevokeMessage>(&parsed.value().body)) {
      revoke(from, *end);
    } else if (const auto* done = std::get_if<ReadDoneMessage>(&parsed.value().body)) {
      read_done(from, *done);
    }
  }

  void end_read(Input& in) {
    if (readers_.empty()) {
      return;
    }
    const AttemptKey attempt = readers_[in.byte() % readers_.size()].attempt;
    if (in.below(4) == 0) {
      revoke(attempt.first, {attempt.second});
    } else {
      read_done(attempt.first, {attempt.second});
    }
  }
  void end_post(Input& in) {
    if (!posts_.empty()) {
      const std::size_t which = in.byte() % posts_.size();
      end_post(which, in.below(4) == 0 ? Reason::kTransportError : Reason::kNone);
    }
  }
  void end_post(std::size_t which, Reason reason) {
    const Post post = posts_[which];
    posts_.erase(posts_.begin() + static_cast<std::ptrdiff_t>(which));
    if (reason == Reason::kNone) {
      tell(post);
    }
    producer_.on_post_ended(post.serve, reason, {}, {}, now_, actions_);
  }
  // A consumer counts a token once, whatever it is told of it later.
  void tell(const Post& post) {
    Told& told = told_.try_emplace(post.attempt).first->second;
    const TokenSpan span = spans_.at(post.attempt);
    const auto has_all = [&] {
      return std::none_of(told.begin() + span.begin, told.begin() + span.end,
                          [](std::uint32_t life) { return life == 0; });
    };
    const bool had_all = has_all();
    const std::uint32_t life = made_.at(post.offer).life;
    std::fill(told.begin() + post.span.begin, told.begin() + post.span.end, life);
    KVPUSH_CHECK(had_all || !has_all() ||
                     std::all_of(told.begin() + span.begin, told.begin() + span.end,
                                 [&](std::uint32_t token) { return token == life; }),
                 "nobody has all while some of it is from before a rewind");
  }

  void carry_out() {
    while (!actions_.empty()) {
      const Actions actions = std::exchange(actions_, {});
      for (const Action& action : actions) {
        if (const auto* post = std::get_if<PostAction>(&action)) {
          begin_post(*post);
        } else if (const auto* send = std::get_if<SendAction>(&action)) {
          check_sent(*send);
        } else if (const auto* end = std::get_if<EndAction>(&action)) {
          check_end(*end);
        } else if (const auto* drop = std::get_if<DropPeerAction>(&action)) {
          lose(drop->peer, now_ + kFence);
        }
      }
    }
  }
  void begin_post(const PostAction& action) {
    const BlockTable* blocks = producer_.producer_blocks(action.serve);
    KVPUSH_CHECK(!pull_, "in pull nothing is written");
    KVPUSH_CHECK(blocks != nullptr && producer_.consumer_blocks(action.serve) != nullptr,
                 "a post has its blocks");
    Post post{action.serve,
              {action.to, producer_.attempt_of(action.serve)},
              action.span,
              blocks->at(0).ids.at(0)};
    KVPUSH_CHECK(!over_.contains(post.attempt), "nothing is posted after its end was told");
    KVPUSH_CHECK(spans_.contains(post.attempt) && spans_.at(post.attempt).contains(action.span),
                 "only what was granted is written");
    const Made& made = made_.at(post.offer);
    KVPUSH_CHECK(action.span.end <= made.watermark, "only what was computed is written");
    KVPUSH_CHECK(made.final || action.span.end == spans_.at(post.attempt).end ||
                     action.span.end % kGranule == 0,
                 "whole granules before the end");
    for (const Post& other : posts_) {
      KVPUSH_CHECK(other.attempt != post.attempt || intersect(other.span, post.span).empty(),
                   "writes to one place are never in flight together");
    }
    posts_.push_back(post);
  }
  void begin_read(Session to, const ReadyMessage& ready) {
    const AttemptKey attempt{to, ready.attempt};
    KVPUSH_CHECK(pull_ && !over_.contains(attempt), "nobody is READY after its end was told");
    for (const Reader& reader : readers_) {
      if (reader.attempt == attempt) {
        return;  // said again
      }
    }
    const Ticket ticket = ready.blocks.at(0).ids.at(0);
    const Made& made = made_.at(ticket);
    KVPUSH_CHECK(made.final && ready.watermark == made.watermark &&
                     ready.watermark >= spans_.at(attempt).end,
                 "READY means all that was granted");
    readers_.push_back({attempt, ticket, 0});
  }
  void check_sent(const SendAction& send) {
    AttemptKey attempt{send.to, 0};
    if (const auto* ready = std::get_if<ReadyMessage>(&send.body)) {
      return begin_read(send.to, *ready);
    }
    if (const auto* failed = std::get_if<FailedMessage>(&send.body)) {
      KVPUSH_CHECK(failed->reason != Reason::kNone, "a failure has a reason");
      attempt.second = failed->attempt;
    } else if (const auto* revoked = std::get_if<RevokedMessage>(&send.body)) {
      attempt.second = revoked->attempt;
    } else if (const auto* confirmed = std::get_if<ConfirmedMessage>(&send.body)) {
      attempt.second = confirmed->attempt;
      KVPUSH_CHECK(pull_ && held_.contains(attempt), "CONFIRMED means held until READ_DONE");
    } else {
      KVPUSH_CHECK(pull_ || !std::holds_alternative<RecallMessage>(send.body),
                   "in push nothing is recalled");
      return;
    }
    over_.insert(attempt);
    for (const Post& post : posts_) {
      KVPUSH_CHECK(post.attempt != attempt, "FAILED and REVOKED promise that nothing is in flight");
    }
    for (const Reader& reader : readers_) {
      KVPUSH_CHECK(reader.attempt != attempt || !may_read(reader),
                   "who may be reading is asked, not told");
    }
  }
  void check_unread(Ticket offer) const {
    for (const Post& post : posts_) {
      KVPUSH_CHECK(post.offer != offer, "blocks go back when nothing reads from them");
    }
    for (const Reader& reader : readers_) {
      KVPUSH_CHECK(reader.offer != offer || !may_read(reader),
                   "blocks go back when no consumer may still read");
    }
  }
  void check_end(const EndAction& end) {
    KVPUSH_CHECK(!end.is_grant && made_.erase(end.ticket) == 1, "an offer ends once");
    KVPUSH_CHECK((end.end == End::kDone) == (end.reason == Reason::kNone), "an end has its reason");
    check_unread(end.ticket);
  }

  bool pull_;
  Producer producer_;
  Actions actions_;
  std::vector<Post> posts_;
  std::vector<Reader> readers_;
  std::map<Ticket, Made> made_;          // live offers
  std::map<Ticket, TransferKey> owned_;  // those that their owner has not finished
  std::set<Ticket> rewinding_;           // what is in flight of them still reads the old blocks
  std::map<AttemptKey, TokenSpan> spans_;
  std::map<AttemptKey, Told> told_;
  std::set<AttemptKey> over_;
  std::set<AttemptKey> held_;  // READ_DONE came while the blocks were held
  Ticket next_ticket_ = 1;
  TimeNs now_ = kSecond;
};

}  // namespace
}  // namespace kvpush::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvpush::fuzz::Input in(data, size);
  kvpush::fuzz::ProducerScript(in.flag()).run(in);
  return 0;
}
