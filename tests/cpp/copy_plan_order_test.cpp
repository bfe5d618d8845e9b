#include "copy_plan_order.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace kvpush {
namespace {

using Pair = std::pair<BlockId, std::uint32_t>;

std::vector<Pair> sorted(BlockOrder& order, const std::vector<BlockId>& ids, BlockId largest) {
  std::vector<Pair> got;
  for (const PlacedBlock& block : order.sort(ids, largest))
    got.emplace_back(block.id, block.place);
  return got;
}

// By definition: the pairs of id and place, sorted, without holes.
std::vector<Pair> expected(const std::vector<BlockId>& ids) {
  std::vector<Pair> pairs;
  for (std::size_t place = 0; place < ids.size(); ++place) {
    if (ids[place] != kNoBlock) pairs.emplace_back(ids[place], static_cast<std::uint32_t>(place));
  }
  std::ranges::sort(pairs);
  return pairs;
}

BlockId largest_of(const std::vector<BlockId>& ids) {
  BlockId largest = 0;
  for (const BlockId id : ids) {
    if (id != kNoBlock) largest = std::max(largest, id);
  }
  return largest;
}

std::vector<BlockId> some_of(std::size_t count, BlockId pool, std::mt19937& random) {
  std::vector<BlockId> ids(pool);
  std::iota(ids.begin(), ids.end(), BlockId{0});
  std::ranges::shuffle(ids, random);
  ids.resize(count);
  return ids;
}

// One order for all: what one list leaves in the scratch memory must not reach the next.
TEST(BlockOrder, IsThatOfTheIdsHoweverManyAndFromHoweverLargeAPool) {
  std::mt19937 random{7};  // NOLINT: the same in each run
  BlockOrder order;
  for (const std::size_t count : {0U, 1U, 2U, 63U, 64U, 65U, 255U, 256U, 257U, 1'000U, 5'000U}) {
    for (const BlockId pool : {5'000U, 20'000U, 300'000U, 3'000'000U}) {
      std::vector<BlockId> ids = some_of(count, pool, random);
      EXPECT_EQ(sorted(order, ids, largest_of(ids)), expected(ids)) << count << " of " << pool;
      for (std::size_t i = 0; i < ids.size(); i += 3)
        ids[i] = kNoBlock;
      EXPECT_EQ(sorted(order, ids, largest_of(ids)), expected(ids)) << count << " of " << pool;
    }
  }
}

TEST(BlockOrder, IdsNamedTwiceComeTwice) {
  std::mt19937 random{8};  // NOLINT: the same in each run
  BlockOrder order;
  for (const std::size_t count : {2U, 100U, 1'000U}) {
    for (const BlockId pool : {20'000U, 3'000'000U}) {
      std::vector<BlockId> ids = some_of(count, pool, random);
      ids.back() = ids.front();
      EXPECT_EQ(sorted(order, ids, largest_of(ids)), expected(ids)) << count << " of " << pool;
      std::ranges::sort(ids);
      EXPECT_EQ(sorted(order, ids, largest_of(ids)), expected(ids)) << "rising, " << count;
    }
  }
}

TEST(BlockOrder, LargestMayLieBeyondTheList) {
  BlockOrder order;
  const std::vector<BlockId> ids{9, 4, kNoBlock, 7};
  for (const BlockId largest : {9U, 63U, 64U, 400U, 100'000U, 0xFFFF'FFFEU})
    EXPECT_EQ(sorted(order, ids, largest), expected(ids)) << largest;
}

TEST(BlockOrder, TheLargestIdsThereAre) {
  std::mt19937 random{9};  // NOLINT: the same in each run
  BlockOrder order;
  for (const std::size_t count : {3U, 1'000U}) {
    std::vector<BlockId> ids = some_of(count, 5'000, random);
    for (BlockId& id : ids)
      id = kNoBlock - 1 - id * 800'000U;  // down to about 300 million
    EXPECT_EQ(sorted(order, ids, largest_of(ids)), expected(ids)) << count;
  }
}

TEST(BlockOrder, HolesAloneAreNothing) {
  BlockOrder order;
  EXPECT_TRUE(order.sort(std::vector<BlockId>(300, kNoBlock), 0xFFFF'FFFFU).empty());
  EXPECT_TRUE(order.sort({}, 0).empty());
}

}  // namespace
}  // namespace kvpush
