#include "poster.h"

#include <algorithm>

#include "message.h"

namespace kvpush {

namespace {
// Plans kept for reuse: as many as are usually under way at once.
constexpr std::size_t kMaxSparePlans = 8;
}  // namespace

PatternPlan Poster::take_spare_plan() {
  if (spare_.empty()) {
    return {};
  }
  return spare_.back().take();
}

void Poster::add(PostJob job) {
  Active active;
  active.result.serve = job.serve;
  active.result.stats.plan_ns = job.plan_ns;
  active.result.stats.descriptors_before = job.plan.descriptors_before;
  if (!spare_.empty()) {
    active.parts = std::move(spare_.back());
    spare_.pop_back();
  }
  active.parts.assign(std::move(job.plan),
                      {config_.max_batch_descriptors, config_.max_batch_bytes});
  active.job = std::move(job);
  if (active.parts.size() > kMaxParts) {
    drop_rest(active, Reason::kBadRequest, "the transfer needs too many descriptors");
  } else if (active.parts.size() == 0 && direction_ == CopyDirection::kWrite) {
    // Nothing to copy (the consumer keeps none of these tokens), but it counts on being told.
    const WrittenMessage written{active.job.attempt, active.job.span, 0, 1};
    const Status sent = transport_.notify(active.job.peer_name, encode_message({self_, written}));
    if (!sent.is_ok()) {
      drop_rest(active, Reason::kTransportError, sent.message());
    }
  }
  queue_.push_back(std::move(active));
}

void Poster::drop_rest(Active& active, Reason reason, std::string detail) {
  active.next_part = active.parts.size();
  if (active.result.reason == Reason::kNone) {
    active.result.reason = reason;
    active.result.detail = std::move(detail);
  }
}

void Poster::post_part(Active& active) {
  const std::string& peer = active.job.peer_name;
  const ListsId lists = active.parts.lists(active.next_part);
  const bool listed = lists != 0 && transport_.has_lists(peer, lists);
  const CopyBatch batch = listed ? active.parts.spell_blocks(active.next_part, buffers_)
                                 : active.parts.spell_out(active.next_part, buffers_.runs);
  Bytes payload;
  if (direction_ == CopyDirection::kWrite) {
    const WrittenMessage written{active.job.attempt, active.job.span,
                                 static_cast<std::uint32_t>(active.next_part),
                                 static_cast<std::uint32_t>(active.parts.size())};
    payload = encode_message({self_, written});
  }
  const TimeNs before = clock_.now();
  if (active.first_post == 0) {
    active.first_post = before;
  }
  const Result<HandleId> handle = transport_.post(direction_, peer, batch, payload);
  active.result.stats.last_post = clock_.now();
  active.result.stats.post_ns += active.result.stats.last_post - before;
  if (!handle.is_ok()) {
    drop_rest(active, Reason::kTransportError, handle.message());
    return;
  }
  const PlanParts::Limits posted = active.parts.measure(active.next_part);
  active.handles.push_back(handle.value());
  ++in_flight_;
  ++in_flight_to_[active.job.to];
  ++handles_posted_;
  posted_from_lists_ += listed ? 1 : 0;
  ++active.next_part;
  active.result.stats.descriptors += posted.runs;
  active.result.stats.bytes += posted.bytes;
  bytes_posted_ += posted.bytes;
}

bool Poster::has_unposted() const noexcept {
  return std::ranges::any_of(
      queue_, [](const Active& active) { return active.next_part != active.parts.size(); });
}

bool Poster::post_next(const std::function<bool(ServeId, Session)>& may_post) {
  for (Active& active : queue_) {
    if (active.next_part == active.parts.size()) {
      continue;
    }
    if (!may_post(active.job.serve, active.job.to)) {
      // Where the serve has ended already, its own reason stands.
      drop_rest(active, Reason::kPeerLost, "the peer gave no sign of life in time");
      continue;
    }
    const auto busy = in_flight_to_.find(active.job.to);
    if (busy != in_flight_to_.end() && busy->second >= config_.max_handles_in_flight) {
      continue;
    }
    post_part(active);
    return true;
  }
  return false;
}

bool Poster::poll_handles(Active& active) {
  bool ended = false;
  for (std::size_t i = 0; i < active.handles.size();) {
    const HandleState state = transport_.poll(active.handles[i]);
    if (state == HandleState::kInProgress) {
      ++i;
      continue;
    }
    if (state == HandleState::kFailed) {
      drop_rest(active, Reason::kTransportError, "the transport reports a failed transfer");
    }
    transport_.release(active.handles[i]);
    active.handles[i] = active.handles.back();
    active.handles.pop_back();
    --in_flight_;
    const auto busy = in_flight_to_.find(active.job.to);
    if (--busy->second == 0) {
      in_flight_to_.erase(busy);
    }
    active.last_done = clock_.now();
    ended = true;
  }
  return ended;
}

void Poster::finish(Active& active, std::vector<PostEnded>& ended) {
  if (active.first_post != 0) {
    active.result.stats.first_post = active.first_post;
    active.result.stats.transfer_ns = active.last_done - active.first_post;
  }
  ended.push_back(std::move(active.result));
  if (spare_.size() < kMaxSparePlans) {
    spare_.push_back(std::move(active.parts));
  }
}

bool Poster::step(const std::function<bool(ServeId, Session)>& may_post,
                  std::vector<PostEnded>& ended) {
  bool progress = post_next(may_post);
  for (auto active = queue_.begin(); active != queue_.end();) {
    progress = poll_handles(*active) || progress;
    if (active->next_part == active->parts.size() && active->handles.empty()) {
      finish(*active, ended);
      active = queue_.erase(active);
      progress = true;
    } else {
      ++active;
    }
  }
  return progress;
}

}  // namespace kvpush
