// Coverage: which tokens of a grant one writer has written, from WRITTEN messages in any order and
// any number of times. Pure: any thread.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "message.h"
#include "types.h"

namespace kvpush {

class Coverage {
 public:
  // Notes a part. False, with nothing noted, if it contradicts what is known (a span announced with
  // another number of parts) or leaves more to remember than a writer ever has unfinished.
  bool add(const WrittenMessage& written);
  bool covers(TokenSpan span) const noexcept;

 private:
  // A writer has one unfinished span for each post under way; a prompt of 2^20 tokens written in
  // steps of 256 makes 4,096.
  static constexpr std::size_t kMaxUnfinished = 4'096;
  // One bit for each: 256 KB. A post is cut into a part for every 1,024 descriptors or 32 MiB, so
  // this is 64 TiB under way at once.
  static constexpr std::size_t kMaxUnfinishedParts = 2 * kMaxParts;

  struct Unfinished {
    std::uint32_t parts = 0;
    std::uint32_t missing = 0;
    std::vector<bool> seen;
  };
  bool merge(TokenSpan span);

  std::vector<TokenSpan> done_;  // sorted, disjoint, not touching
  std::map<TokenSpan, Unfinished> unfinished_;
  std::size_t unfinished_parts_ = 0;
};

}  // namespace kvpush
