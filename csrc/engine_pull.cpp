// The engine's part of pull: READs from a producer's blocks, and the proof that it still holds
// them.
#include <algorithm>
#include <utility>

#include "engine.h"

namespace kvpush {

namespace {
// As for writes: parts posted in one tick before messages get a turn again.
constexpr int kPartsPerTick = 4;
}  // namespace

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
  const TimeNs begin = clock_.now();
  Reason reason = Reason::kPeerLost;
  std::string detail = "the producer is gone";
  if (peer != peers_.end() && peer->second.reader != nullptr && grant != nullptr) {
    PostJob job;
    job.plan = reader_.take_spare_plan();
    const Status planned =
        peer->second.reader->plan_pattern(grant->span, grant->blocks, action.blocks, job.plan);
    if (planned.is_ok()) {
      job.serve = action.read;
      job.to = action.from;
      job.peer_name = peer->second.name;
      job.attempt = grant->attempt;
      job.span = grant->span;
      job.plan_ns = clock_.now() - begin;
      totals_.descriptors_planned += job.plan.descriptors_before;
      reader_.add(std::move(job));
      return;
    }
    reason = Reason::kBadRequest;
    detail = planned.message();
  }
  scratch_.clear();
  consumer_.on_read_ended(action.read, reason, std::move(detail), {}, clock_.now(), scratch_);
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
}

bool Engine::step_reads() {
  const auto may_read = [this](ReadId read, Session from) {
    const auto peer = peers_.find(from);
    // Rule 3, the consumer's part: a producer that may be out of reach may be giving its blocks
    // back. The time is read anew for each post: this process may have been stopped since the last.
    return peer != peers_.end() && peer->second.held != 0 &&
           clock_.now() - peer->second.held < config_.peer_timeout && consumer_.may_read(read);
  };
  bool progress = false;
  for (int part = 0; part < kPartsPerTick; ++part) {
    ended_.clear();
    if (!reader_.step(may_read, ended_)) {
      break;
    }
    progress = true;
    for (PostEnded& post : ended_) {
      scratch_.clear();
      totals_.descriptors_posted += post.stats.descriptors;
      consumer_.on_read_ended(post.serve, post.reason, std::move(post.detail), post.stats,
                              clock_.now(), scratch_);
      std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
      run_actions();
    }
  }
  return progress;
}

}  // namespace kvpush
