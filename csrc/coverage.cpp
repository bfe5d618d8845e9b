#include "coverage.h"

#include <algorithm>

namespace kvpush {

bool Coverage::add(const WrittenMessage& written) {
  if (covers(written.span)) {
    return true;  // a duplicate
  }
  if (written.parts == 1) {
    return merge(written.span);
  }
  auto found = unfinished_.find(written.span);
  if (found == unfinished_.end()) {
    if (unfinished_.size() >= kMaxUnfinished ||
        unfinished_parts_ + written.parts > kMaxUnfinishedParts) {
      return false;
    }
    unfinished_parts_ += written.parts;
    found = unfinished_
                .emplace(written.span, Unfinished{written.parts, written.parts,
                                                  std::vector<bool>(written.parts, false)})
                .first;
  }
  Unfinished& entry = found->second;
  if (entry.parts != written.parts) {
    return false;
  }
  if (!entry.seen[written.part]) {
    entry.seen[written.part] = true;
    --entry.missing;
  }
  if (entry.missing == 0) {
    unfinished_parts_ -= entry.parts;
    unfinished_.erase(found);
    return merge(written.span);
  }
  return true;
}

bool Coverage::covers(TokenSpan span) const noexcept {
  return span.empty() || std::any_of(done_.begin(), done_.end(),
                                     [span](TokenSpan done) { return done.contains(span); });
}

bool Coverage::merge(TokenSpan span) {
  std::vector<TokenSpan> kept;
  for (const TokenSpan done : done_) {
    if (done.end < span.begin || span.end < done.begin) {
      kept.push_back(done);
    } else {
      span.begin = std::min(span.begin, done.begin);
      span.end = std::max(span.end, done.end);
    }
  }
  if (kept.size() >= kMaxUnfinished) {
    return false;
  }
  kept.push_back(span);
  std::sort(kept.begin(), kept.end());
  done_ = std::move(kept);
  return true;
}

}  // namespace kvpush
