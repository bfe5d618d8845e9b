// Every interleaving of up to seven events of one transfer, pushed and pulled, on a producer and a
// consumer state machine joined by two ordered queues: after each, all is let run out, and every
// promise is checked.
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "consumer.h"
#include "producer.h"
#include "support/script.h"

namespace kvpush {
namespace {

constexpr int kDepth = 7;
constexpr Session kP = 10;
constexpr Session kD = 20;
constexpr Ticket kOffer = 1;
constexpr Ticket kMaxGrants = 2;  // the second is a newer attempt
constexpr DurationNs kFence = 5 * kSecond;
constexpr DurationNs kDeadline = 30 * kSecond;
constexpr TokenSpan kSpan{0, 8};

// The events. Each is one letter in the report of a failure.
constexpr std::string_view kEvents = "gvofwdrexLl";
constexpr std::string_view kPullEvents = "gvofwdrexLlt";

struct Post {
  PostAction action;
  Attempt attempt = 0;
};
struct Read {
  ReadId id = 0;
  Attempt attempt = 0;
};

// One state of both sides; copied at each branch.
struct Pair {
  explicit Pair(bool pulls) : pull(pulls) {}

  bool pull;
  Producer producer{[this] {
    ProducerConfig config;
    config.granularity_tokens = 4;
    config.reads = pull;
    return config;
  }()};
  Consumer consumer{[this] {
    ConsumerConfig config;
    config.reads = pull;
    return config;
  }()};
  TimeNs now = kSecond;
  std::deque<MessageBody> to_producer;
  std::deque<MessageBody> to_consumer;
  std::deque<Post> posts;
  std::deque<Read> reads;
  std::set<Attempt> stale;  // READs of these looked at blocks that had been given back
  Ticket grants = 0;
  bool offered = false;
  bool finished = false;  // the producer's application adds nothing more
  bool consumer_lost_it = false;
  bool producer_lost_it = false;
  std::map<Ticket, int> grant_ends;
  int offer_ends = 0;
  std::string fault;

  void check(bool holds, const char* what) {
    if (!holds && fault.empty()) {
      fault = what;
    }
  }

  void run_consumer(Actions actions) {
    for (Action& action : actions) {
      if (auto* send = std::get_if<SendAction>(&action)) {
        if (!consumer_lost_it) {
          to_producer.push_back(std::move(send->body));
        }
      } else if (const auto* end = std::get_if<EndAction>(&action)) {
        ++grant_ends[end->ticket];
        for (const Post& post : posts) {
          // A lost producer is held back by the fence and its own proof of life: the engine's part.
          check(post.attempt != end->ticket || consumer_lost_it,
                "blocks went back while a post into them was in flight");
        }
        for (const Read& read : reads) {
          check(read.attempt != end->ticket, "blocks went back while a READ was in flight");
        }
        check(end->end != End::kDone || end->reason == Reason::kNone, "done, with a reason");
        check(end->end != End::kDone || !stale.contains(end->ticket),
              "what was read after the source went back counts as received");
      } else if (const auto* read = std::get_if<ReadAction>(&action)) {
        check(consumer.may_read(read->read), "READs for a grant that is ending");
        reads.push_back({read->read, consumer.grant_of(read->read)->attempt});
      } else if (std::get_if<DropPeerAction>(&action) != nullptr) {
        lose_producer();
      }
    }
  }
  void run_producer(Actions actions) {
    for (Action& action : actions) {
      if (auto* send = std::get_if<SendAction>(&action)) {
        if (!producer_lost_it && !consumer_lost_it) {
          to_consumer.push_back(std::move(send->body));
        }
      } else if (const auto* post = std::get_if<PostAction>(&action)) {
        const Attempt attempt = producer.attempt_of(post->serve);
        check(attempt != 0 && producer.may_post(post->serve), "a post of a serve that has ended");
        check(grant_ends[attempt] == 0 || consumer_lost_it, "a post into blocks given back");
        for (const Post& other : posts) {
          check(other.attempt != attempt || intersect(other.action.span, post->span).empty(),
                "two writes to one place in flight together");
        }
        posts.push_back({*post, attempt});
      } else if (std::get_if<EndAction>(&action) != nullptr) {
        ++offer_ends;
        check(posts.empty(), "the offer's blocks went back while a post read from them");
        // Beyond the fence of a lost consumer it is that one's own proof of life that holds it
        // back.
        check(reads.empty() || producer_lost_it,
              "the offer's blocks went back while they were read");
        for (const Read& read : reads) {
          stale.insert(read.attempt);
        }
      } else if (std::get_if<DropPeerAction>(&action) != nullptr) {
        lose_consumer();
      }
    }
  }

  void lose_producer() {
    consumer_lost_it = true;
    to_producer.clear();
    to_consumer.clear();
    Actions out;
    consumer.on_peer_lost(kP, now + kFence, now, out);
    run_consumer(std::move(out));
  }
  void lose_consumer() {
    producer_lost_it = true;
    to_producer.clear();
    Actions out;
    producer.on_peer_lost(kD, now + kFence, now, out);
    run_producer(std::move(out));
  }
  void tick(DurationNs time) {
    now += time;
    Actions out;
    consumer.on_tick(now, out);
    run_consumer(std::move(out));
    Actions more;
    producer.on_tick(now, more);
    run_producer(std::move(more));
  }
  void grant() {
    GrantCommand command;
    command.ticket = ++grants;
    command.attempt = grants;
    command.key = script::key_of("r");
    command.span = kSpan;
    command.blocks = {GroupBlocks{0, {1, 2}}};
    command.writers = {kP};
    command.deadline = now + kDeadline;
    Actions out;
    consumer.grant(std::move(command), now, out);
    run_consumer(std::move(out));
  }
  void offer(std::uint32_t watermark, bool final) {
    OfferCommand command;
    command.ticket = kOffer;
    command.key = script::key_of("r");
    command.new_blocks = {GroupBlocks{0, {7}}};
    command.watermark = watermark;
    command.final = final;
    offered = true;
    finished = final;
    Actions out;
    producer.offer(std::move(command), now, out);
    run_producer(std::move(out));
  }
  void withdraw() {
    finished = true;
    Actions out;
    producer.withdraw(kOffer, Reason::kProducerAborted, now, out);
    producer.fail_key(script::key_of("r"), Reason::kProducerAborted, now, out);
    run_producer(std::move(out));
  }
  void deliver_to_producer() {
    MessageBody body = std::move(to_producer.front());
    to_producer.pop_front();
    Actions out;
    if (auto* grant = std::get_if<GrantMessage>(&body)) {
      producer.on_grant({kD, "D", 1}, std::move(*grant), now, out);
    } else if (const auto* done = std::get_if<ReadDoneMessage>(&body)) {
      producer.on_read_done(kD, *done, now, out);
    } else {
      producer.on_revoke(kD, std::get<RevokeMessage>(body), now, out);
    }
    run_producer(std::move(out));
  }
  void deliver_to_consumer() {
    MessageBody body = std::move(to_consumer.front());
    to_consumer.pop_front();
    Actions out;
    if (const auto* accepted = std::get_if<AcceptedMessage>(&body)) {
      consumer.on_accepted(kP, *accepted, now, out);
    } else if (const auto* written = std::get_if<WrittenMessage>(&body)) {
      consumer.on_written(kP, *written, now, out);
    } else if (const auto* failed = std::get_if<FailedMessage>(&body)) {
      consumer.on_failed(kP, *failed, now, out);
    } else if (auto* ready = std::get_if<ReadyMessage>(&body)) {
      consumer.on_ready(kP, *ready, now, out);
    } else if (const auto* confirmed = std::get_if<ConfirmedMessage>(&body)) {
      consumer.on_confirmed(kP, *confirmed, now, out);
    } else if (const auto* recall = std::get_if<RecallMessage>(&body)) {
      consumer.on_recall(kP, *recall, now, out);
    } else {
      consumer.on_revoked(kP, std::get<RevokedMessage>(body), now, out);
    }
    run_consumer(std::move(out));
  }
  // The oldest post ends. Its WRITTEN is on the way before the producer knows of its end.
  void end_post(bool well) {
    const Post post = posts.front();
    posts.pop_front();
    if (well && !producer_lost_it && !consumer_lost_it) {
      to_consumer.emplace_back(WrittenMessage{post.attempt, post.action.span, 0, 1});
    }
    Actions out;
    producer.on_post_ended(post.action.serve, well ? Reason::kNone : Reason::kTransportError, "",
                           {}, now, out);
    run_producer(std::move(out));
  }

  void end_read(bool well) {
    const Read read = reads.front();
    reads.pop_front();
    Actions out;
    consumer.on_read_ended(read.id, well ? Reason::kNone : Reason::kTransportError, "", {}, now,
                           out);
    run_consumer(std::move(out));
  }
  bool end_oldest(bool well) {
    if (!posts.empty()) {
      end_post(well);
    } else if (!reads.empty()) {
      end_read(well);
    } else {
      return false;
    }
    return true;
  }

  // False: the event cannot happen now.
  bool step(char event) {
    switch (event) {
      case 'g':
        return grants < kMaxGrants && !consumer_lost_it && (grant(), true);
      case 'v': {
        if (grants == 0) {
          return false;
        }
        Actions out;
        consumer.revoke(grants, Reason::kRevoked, now, out);
        run_consumer(std::move(out));
        return true;
      }
      case 'o':
        return !finished && !offered && (offer(4, false), true);
      case 'f':
        return !finished && (offer(8, true), true);
      case 'w':
        return !(finished && offered && offer_ends != 0) && (withdraw(), true);
      case 'd':
        return !to_producer.empty() && (deliver_to_producer(), true);
      case 'r':
        return !to_consumer.empty() && (deliver_to_consumer(), true);
      case 'e':
        return end_oldest(true);
      case 'x':
        return end_oldest(false);
      case 't':
        return producer_lost_it && (tick(kFence + kSecond), true);
      case 'L':
        return !consumer_lost_it && (lose_producer(), true);
      default:
        return !producer_lost_it && (lose_consumer(), true);
    }
  }

  // Lets everything run out, then looks at what must hold.
  void settle() {
    if (offered && !finished) {
      offer(8, true);
    }
    for (int round = 0; round < 400; ++round) {
      while (end_oldest(true)) {
      }
      while (!to_producer.empty()) {
        deliver_to_producer();
      }
      while (!to_consumer.empty()) {
        deliver_to_consumer();
      }
      if (round > 0) {
        tick(kSecond);
      }
    }
    for (Ticket ticket = 1; ticket <= grants; ++ticket) {
      check(grant_ends[ticket] == 1, "a grant did not end once");
    }
    check(offer_ends == (offered ? 1 : 0), "the offer did not end once");
    check(consumer.live() == 0, "the consumer's table is not empty");
    check(producer.live_offers() + producer.live_serves() + producer.keys() == 0,
          "the producer's tables are not empty");
  }
};

std::uint64_t explore(const Pair& pair, const std::string& past) {
  std::uint64_t count = 1;
  Pair last = pair;
  last.settle();
  EXPECT_TRUE(last.fault.empty()) << last.fault << " after '" << past << "'";
  if (past.size() == kDepth || ::testing::Test::HasFailure()) {
    return count;
  }
  for (const char event : pair.pull ? kPullEvents : kEvents) {
    Pair next = pair;
    if (next.step(event)) {
      count += explore(next, past + event);
    }
  }
  return count;
}

TEST(Interleavings, OfUpToSevenEventsKeepEveryPromise) {
  const std::uint64_t count = explore(Pair(false), "");
  EXPECT_GT(count, 50'000U);
  RecordProperty("interleavings", static_cast<int>(count));
}

TEST(Interleavings, OfUpToSevenEventsKeepEveryPromiseOfPull) {
  const std::uint64_t count = explore(Pair(true), "");
  EXPECT_GT(count, 50'000U);
  RecordProperty("interleavings", static_cast<int>(count));
}

}  // namespace
}  // namespace kvpush
