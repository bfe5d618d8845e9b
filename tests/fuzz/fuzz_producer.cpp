// A producer fed any sequence of offers, grants and ends of posts, beside a record of what is in
// flight. Nothing is posted after a promise to write no more, no such promise is made while a post
// is in flight, no offer ends while a post reads from it, and at the end the tables are empty.
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

struct Post {
  ServeId serve = 0;
  std::pair<Session, Attempt> attempt;
  TokenSpan span;
  Ticket offer = 0;
};
struct Made {
  TransferKey key;
  std::uint32_t watermark = 0;
  bool final = false;
};

class ProducerScript {
 public:
  void run(Input& in) {
    while (!in.empty()) {
      step(in);
      carry_out();
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
  static ProducerConfig config() {
    ProducerConfig config;
    config.granularity_tokens = kGranule;
    return config;
  }

  void step(Input& in) {
    switch (in.below(12)) {
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
      case 6:
        return producer_.on_peer_lost(consumer(in), now_, now_, actions_);
      case 7: {
        static constexpr DurationNs kSteps[] = {kMillisecond, 6 * kSecond, 125 * kSecond,
                                                250 * kSecond};
        now_ += kSteps[in.below(4)];
        return producer_.on_tick(now_, actions_);
      }
      case 8:
      case 9:
        if (!posts_.empty()) {
          const std::size_t which = in.byte() % posts_.size();
          end_post(which, in.below(4) == 0 ? Reason::kTransportError : Reason::kNone);
        }
        return;
      case 10:
        return raw(in);
      default: {
        const Session from = consumer(in);
        return grant(from, arbitrary_grant(in), in.below(4));
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
    OfferCommand command;
    command.ticket = owned->first;
    command.key = owned->second;
    command.watermark = in.below(33);
    command.final = in.flag();
    command.new_blocks = arbitrary_blocks(in);
    if (const auto made = made_.find(command.ticket); made != made_.end()) {
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
  void grant(Session from, GrantMessage message, std::uint32_t fan_out) {
    const ConsumerPeer peer{from, from < kConsumers ? "ranks" : "other", fan_out};
    spans_.try_emplace({from, message.attempt}, message.span);
    producer_.on_grant(peer, std::move(message), now_, actions_);
  }
  void revoke(Session from, const RevokeMessage& message) {
    producer_.on_revoke(from, message, now_, actions_);
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
    }
  }

  void end_post(std::size_t which, Reason reason) {
    const Post post = posts_[which];
    posts_.erase(posts_.begin() + static_cast<std::ptrdiff_t>(which));
    producer_.on_post_ended(post.serve, reason, {}, {}, now_, actions_);
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
        }
      }
    }
  }
  void begin_post(const PostAction& action) {
    const BlockTable* blocks = producer_.producer_blocks(action.serve);
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
  void check_sent(const SendAction& send) {
    std::pair<Session, Attempt> attempt{send.to, 0};
    if (const auto* failed = std::get_if<FailedMessage>(&send.body)) {
      KVPUSH_CHECK(failed->reason != Reason::kNone, "a failure has a reason");
      attempt.second = failed->attempt;
    } else if (const auto* revoked = std::get_if<RevokedMessage>(&send.body)) {
      attempt.second = revoked->attempt;
    } else {
      return;
    }
    over_.insert(attempt);
    for (const Post& post : posts_) {
      KVPUSH_CHECK(post.attempt != attempt, "FAILED and REVOKED promise that nothing is in flight");
    }
  }
  void check_end(const EndAction& end) {
    KVPUSH_CHECK(!end.is_grant && made_.erase(end.ticket) == 1, "an offer ends once");
    KVPUSH_CHECK((end.end == End::kDone) == (end.reason == Reason::kNone), "an end has its reason");
    for (const Post& post : posts_) {
      KVPUSH_CHECK(post.offer != end.ticket, "blocks go back when nothing reads from them");
    }
  }

  Producer producer_{config()};
  Actions actions_;
  std::vector<Post> posts_;
  std::map<Ticket, Made> made_;          // live offers
  std::map<Ticket, TransferKey> owned_;  // those that their owner has not finished
  std::map<std::pair<Session, Attempt>, TokenSpan> spans_;
  std::set<std::pair<Session, Attempt>> over_;
  Ticket next_ticket_ = 1;
  TimeNs now_ = kSecond;
};

}  // namespace
}  // namespace kvpush::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvpush::fuzz::Input in(data, size);
  kvpush::fuzz::ProducerScript().run(in);
  return 0;
}
