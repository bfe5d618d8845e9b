// What the two state machines of the rendezvous have in common: the actions they ask for.
//
// Consumer (consumer.h) and Producer (producer.h) are pure: a command, a message, the end of a post
// or the passing of time goes in with the present time, and actions come out. They know no
// transport, clock or thread; the engine carries the actions out in order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "message.h"
#include "status.h"
#include "types.h"

namespace kvpush {

// Names one grant that the producer serves; never reused.
using ServeId = std::uint64_t;

// Names the READs that a consumer makes from one of its writers; never reused.
using ReadId = std::uint64_t;

// How a grant or an offer ended.
enum class End : std::uint8_t { kDone = 0, kFailed = 1, kRevoked = 2 };

// What the writes (push) or READs (pull) cost, summed over a transfer. Times in nanoseconds.
struct PostStats {
  std::uint64_t bytes = 0;
  std::uint64_t descriptors_before = 0;
  std::uint64_t descriptors = 0;
  std::int64_t plan_ns = 0;
  std::int64_t post_ns = 0;
  std::int64_t transfer_ns = 0;  // first post to last completion
  // On the monotonic clock: the first call to post begins, the last one returns. 0: none was made.
  std::int64_t first_post = 0;
  std::int64_t last_post = 0;

  void add(const PostStats& other) noexcept {
    bytes += other.bytes;
    descriptors_before += other.descriptors_before;
    descriptors += other.descriptors;
    plan_ns += other.plan_ns;
    post_ns += other.post_ns;
    transfer_ns += other.transfer_ns;
    if (first_post == 0 || (other.first_post != 0 && other.first_post < first_post)) {
      first_post = other.first_post;
    }
    last_post = std::max(last_post, other.last_post);
  }
};

// Send `body` to a peer. If that fails the engine treats the peer as lost.
struct SendAction {
  Session to = 0;
  MessageBody body;
};
// Plan and post the writes of `span`. Answered by exactly one Producer::on_post_ended().
struct PostAction {
  ServeId serve = 0;
  Session to = 0;
  TokenSpan span;
  bool last = false;  // reaches the end of the grant: state regions go with it
};
// Pull. Plan and post the READs of a grant's whole span from these blocks of the producer. Answered
// by exactly one Consumer::on_read_ended().
struct ReadAction {
  ReadId read = 0;
  Session from = 0;
  BlockTable blocks;
};
// Tell Python how a grant or an offer ended. The last action about this ticket.
struct EndAction {
  Ticket ticket = 0;
  bool is_grant = false;  // else an offer
  End end = End::kDone;
  Reason reason = Reason::kNone;
  std::string detail;
  Session peer = 0;
  PostStats stats;
};
// Stop talking to a peer that does not do its part; answered by on_peer_lost().
struct DropPeerAction {
  Session peer = 0;
  std::string why;
};

using Action = std::variant<SendAction, PostAction, ReadAction, EndAction, DropPeerAction>;
using Actions = std::vector<Action>;

}  // namespace kvpush
