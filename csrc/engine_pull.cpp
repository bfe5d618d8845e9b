// The engine's part of pull: READs from a producer's blocks, and the proof that it still holds
// them.
#include <algorithm>
#include <utility>

#include "engine.h"

namespace kvpush {

// A producer sends our stamp back in the meeting in which it serves us: it then held what it had
// said READY, and holds it for as long as we may read after that time.
void Engine::note_held(Peer& peer, const Message& message) {
  const bool ours = peer.welcomed && message.serving != 0 && message.serving == peer.our_meeting;
  if (ours && message.echo <= static_cast<std::uint64_t>(clock_.now())) {
    peer.held = std::max(peer.held, static_cast<TimeNs>(message.echo));
  }
}

void Engine::run(ReadAction& action) {
  const auto peer = peers_.find(action.from);
  const GrantCommand* grant = consumer_.grant_of(action.read);
  PostEnded failed{action.read, Reason::kPeerLost, "the producer is gone", {}};
  if (peer != peers_.end() && peer->second.reader != nullptr && grant != nullptr) {
    PostJob job;
    job.serve = action.read;
    job.to = action.from;
    job.peer_name = peer->second.name;
    job.attempt = grant->attempt;
    job.span = grant->span;
    const Status planned = add_copy(reader_, *peer->second.reader, grant->blocks, action.blocks,
                                    StateRegions::kCopied, std::move(job));
    if (planned.is_ok()) {
      return;
    }
    failed.reason = Reason::kBadRequest;
    failed.detail = planned.message();
  }
  collect([&](Actions& out) { end_read(failed, out); });
}

void Engine::end_read(PostEnded& post, Actions& out) {
  consumer_.on_read_ended(post.serve, post.reason, std::move(post.detail), post.stats, clock_.now(),
                          out);
}

bool Engine::step_reads() {
  const auto may_read = [this](ReadId read, Session from) {
    const auto peer = peers_.find(from);
    return peer != peers_.end() && is_fresh(peer->second.held) && consumer_.may_read(read);
  };
  return step(reader_, may_read, &Engine::end_read);
}

}  // namespace kvpush
