#include "coverage.h"

#include <algorithm>

namespace kvpush {

bool Coverage::add(const WrittenMessage& written) {
  if (covers(written.span)) {
    return true;  // a duplicate
  }
  if (written.parts == 1) {
    merge(written.span);
    return true;
  }
  auto found = unfinished_.find(written.span);
  if (found == unfinished_.end()) {
    if (unfinished_.size() >= kMaxUnfinished) {
      return false;
    }
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
    unfinished_.erase(found);
    merge(written.span);
  }
  return true;
}

bool Coverage::covers(TokenSpan span) const noexcept {
  return span.empty() || std::any_of(done_.begin(), done_.end(), [span](TokenSpan done) {
           return done.contains(span);
         });
}

void Coverage::merge(TokenSpan span) {
  if (span.empty()) {
    return;
  }
  std::vector<TokenSpan> kept;
  for (const TokenSpan done : done_) {
    if (done.end < span.begin || span.end < done.begin) {
      kept.push_back(done);
    } else {
      span.begin = std::min(span.begin, done.begin);
      span.end = std::max(span.end, done.end);
    }
  }
  kept.push_back(span);
  std::sort(kept.begin(), kept.end());
  done_ = std::move(kept);
}

}  // namespace kvpush
