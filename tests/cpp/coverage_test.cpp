#include "coverage.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

namespace kvpush {
namespace {

WrittenMessage part(TokenSpan span, std::uint32_t index = 0, std::uint32_t parts = 1) {
  return {1, span, index, parts};
}

TEST(Coverage, CoversTheUnionInAnyOrder) {
  std::vector<TokenSpan> spans{{0, 8}, {8, 16}, {16, 32}, {4, 20}};
  std::sort(spans.begin(), spans.end());
  do {
    Coverage coverage;
    std::vector<bool> tokens(32, false);
    for (const TokenSpan span : spans) {
      EXPECT_TRUE(coverage.add(part(span)));
      std::fill(tokens.begin() + span.begin, tokens.begin() + span.end, true);
      const bool all = std::all_of(tokens.begin(), tokens.end(), [](bool seen) { return seen; });
      EXPECT_EQ(coverage.covers({0, 32}), all);
    }
  } while (std::next_permutation(spans.begin(), spans.end()));
}

TEST(Coverage, AGapIsAGap) {
  Coverage coverage;
  EXPECT_TRUE(coverage.add(part({0, 8})));
  EXPECT_TRUE(coverage.add(part({9, 16})));
  EXPECT_FALSE(coverage.covers({0, 16}));
  EXPECT_TRUE(coverage.covers({9, 16}));
  EXPECT_TRUE(coverage.covers({5, 5}));
}

TEST(Coverage, PartsCountOnceEach) {
  Coverage coverage;
  EXPECT_TRUE(coverage.add(part({0, 8}, 2, 3)));
  EXPECT_TRUE(coverage.add(part({0, 8}, 2, 3)));
  EXPECT_TRUE(coverage.add(part({0, 8}, 2, 3)));
  EXPECT_FALSE(coverage.covers({0, 8}));
  EXPECT_FALSE(coverage.add(part({0, 8}, 0, 4)));
  EXPECT_TRUE(coverage.add(part({0, 8}, 0, 3)));
  EXPECT_TRUE(coverage.add(part({0, 8}, 1, 3)));
  EXPECT_TRUE(coverage.covers({0, 8}));
  EXPECT_TRUE(coverage.add(part({0, 8}, 0, 4)));  // late, and of no matter
}

TEST(Coverage, MemoryIsBounded) {
  Coverage parts;
  EXPECT_TRUE(parts.add(part({0, 1}, 0, kMaxParts)));
  EXPECT_TRUE(parts.add(part({1, 2}, 0, kMaxParts)));
  EXPECT_FALSE(parts.add(part({2, 3}, 0, kMaxParts)));
  Coverage unfinished;
  Coverage done;
  std::size_t kept = 0;
  for (std::uint32_t i = 0; i < 10'000; ++i) {
    kept += unfinished.add(part({2 * i, 2 * i + 1}, 0, 2)) ? 1U : 0U;
    kept += done.add(part({2 * i, 2 * i + 1})) ? 1U : 0U;
  }
  EXPECT_EQ(kept, 2 * 4'096U);
}

}  // namespace
}  // namespace kvpush
