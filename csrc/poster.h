// Poster: turns planned copies into transport handles, batch by batch, and follows them to their
// end. Loop thread only.
//
// A post is cut into parts of bounded size for three reasons: posting blocks the caller (4 to 8 us
// a descriptor on UCX over cross-memory attach), so messages must get a turn in between; a process
// stopped in the middle of a part should hold next to nothing that writes; and the first parts
// travel while later ones are prepared. A part of a write carries its own WRITTEN; READs (pull)
// carry nothing, and their `serve` is a ReadId.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "copy_plan.h"
#include "copy_plan_parts.h"
#include "rendezvous.h"
#include "transport.h"

namespace kvpush {

struct PosterConfig {
  std::uint32_t max_batch_descriptors = 1'024;  // 4 to 8 ms of posting at worst
  std::uint64_t max_batch_bytes = 32ULL << 20;  // 3 to 6 ms of copying at 5 to 10 GB/s
  // To each peer: keeps an RDMA queue busy, and a peer that takes nothing leaves the others alone.
  std::uint32_t max_handles_in_flight = 64;
};

struct PostJob {
  ServeId serve = 0;
  Session to = 0;
  std::string peer_name;
  Attempt attempt = 0;
  TokenSpan span;
  PatternPlan plan;
  std::int64_t plan_ns = 0;
};

struct PostEnded {
  ServeId serve = 0;
  Reason reason = Reason::kNone;
  std::string detail;
  PostStats stats;
};

class Poster {
 public:
  Poster(Transport& transport, const Clock& clock, Session self, PosterConfig config,
         CopyDirection direction = CopyDirection::kWrite)
      : transport_(transport), clock_(clock), self_(self), config_(config), direction_(direction) {}

  void add(PostJob job);
  // Posts at most one part and reads every handle in flight. `may_post(serve, to)` is asked before
  // the part is posted; what may not be posted any more is dropped. Ended jobs are appended to
  // `ended`. True if something was posted or has ended.
  bool step(const std::function<bool(ServeId, Session)>& may_post, std::vector<PostEnded>& ended);

  // A plan whose buffers may be reused, to keep the steady state free of allocations.
  PatternPlan take_spare_plan();

  // Jobs that have not ended, and whether a part of any is still to be posted.
  std::size_t queued() const noexcept { return queue_.size(); }
  bool has_unposted() const noexcept;
  std::size_t handles_in_flight() const noexcept { return in_flight_; }
  std::uint64_t handles_posted() const noexcept { return handles_posted_; }
  std::uint64_t posted_from_lists() const noexcept { return posted_from_lists_; }
  std::uint64_t bytes_posted() const noexcept { return bytes_posted_; }

 private:
  struct Active {
    PostJob job;
    PlanParts parts;  // of the job's plan
    std::size_t next_part = 0;
    std::vector<HandleId> handles;
    TimeNs first_post = 0;
    TimeNs last_done = 0;
    PostEnded result;
  };

  bool post_next(const std::function<bool(ServeId, Session)>& may_post);
  void post_part(Active& active);
  bool poll_handles(Active& active);
  void drop_rest(Active& active, Reason reason, std::string detail);
  void finish(Active& active, std::vector<PostEnded>& ended);

  Transport& transport_;
  const Clock& clock_;
  Session self_;
  PosterConfig config_;
  CopyDirection direction_;
  std::deque<Active> queue_;
  std::vector<PlanParts> spare_;  // of ended jobs, for their memory
  PartBuffers buffers_;           // of the part that is posted
  std::size_t in_flight_ = 0;
  std::unordered_map<Session, std::uint32_t> in_flight_to_;  // no entry: none
  std::uint64_t handles_posted_ = 0;
  std::uint64_t posted_from_lists_ = 0;
  std::uint64_t bytes_posted_ = 0;
};

}  // namespace kvpush
