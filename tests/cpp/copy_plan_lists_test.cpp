// Plans that name prepared lists: whatever comes from lists must be what the runs say.
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "copy_plan.h"
#include "copy_plan_parts.h"
#include "support/runs.h"

namespace kvpush {
namespace {

constexpr std::uint64_t kTokenBytes = 32;
constexpr std::uint64_t kProducerBase = std::uint64_t{1} << 40;
constexpr std::uint64_t kConsumerBase = std::uint64_t{1} << 50;
constexpr std::uint64_t kLayerStep = std::uint64_t{1} << 36;
constexpr PlanParts::Limits kNoLimits{1U << 30, std::uint64_t{1} << 60};

struct Side {
  std::uint32_t layers = 8;
  std::uint32_t blocks = 1'000;
  std::uint32_t tokens = 16;
  std::uint64_t gap = 0;     // between blocks
  bool two_classes = false;  // every other layer has twice the heads
  bool halves = false;       // all keys, then all values
};

std::vector<Region> make_rank(std::uint64_t base, const Side& side) {
  std::vector<Region> regions;
  for (std::uint32_t i = 0; i < side.layers; ++i) {
    Region region;
    region.layer = "layer." + std::to_string(i);
    region.dtype = "bfloat16";
    region.base = base + i * kLayerStep;
    region.num_blocks = side.blocks;
    region.tokens_per_block = region.tokens_per_page = side.tokens;
    region.heads = region.total_heads = side.two_classes && i % 2 == 1 ? 2 : 1;
    region.element_bytes = kTokenBytes;
    region.head_stride = kTokenBytes;
    region.token_stride = kTokenBytes * region.heads;
    region.block_stride = region.token_stride * side.tokens + side.gap;
    region.components = side.halves ? 2 : 1;
    region.component_stride = region.block_stride * side.blocks;
    regions.push_back(std::move(region));
  }
  return regions;
}

CopyPlanner make_planner(const Side& producer, const Side& consumer, const ListsRule& rule,
                         bool local_is_producer = true) {
  const std::vector<Region> from = make_rank(kProducerBase, producer);
  const std::vector<Region> to = make_rank(kConsumerBase, consumer);
  const Result<Assignment> assigned = assign_writers({&from, 1}, {&to, 1});
  EXPECT_TRUE(assigned.is_ok()) << assigned.message();
  CopyPlanner planner(local_is_producer ? from : to, local_is_producer ? to : from,
                      assigned.value().pairs(0, 0), local_is_producer);
  planner.set_lists_rule(rule);
  return planner;
}

std::vector<BlockId> some_blocks(std::uint32_t pool, std::uint32_t count, std::mt19937& random) {
  std::vector<BlockId> ids(pool);
  std::iota(ids.begin(), ids.end(), BlockId{0});
  std::ranges::shuffle(ids, random);
  ids.resize(count);
  return ids;
}

PatternPlan plan_of(CopyPlanner& planner, TokenSpan span, const BlockTable& local,
                    const BlockTable& remote) {
  PatternPlan plan;
  const Status status = planner.plan_pattern(span, local, remote, plan);
  EXPECT_TRUE(status.is_ok()) << status.message();
  return plan;
}

using Grids = std::map<ListsId, BlockGrid>;

// Prepares whatever the planner wants, but for those grids that `refuse` says can't be had.
template <typename Refuse>
void prepare(CopyPlanner& planner, Grids& grids, const Refuse& refuse) {
  while (const BlockGrid* grid = planner.wanted_grid()) {
    EXPECT_TRUE(planner.wants_lists());
    if (refuse()) {
      planner.set_lists(0);
      continue;
    }
    const ListsId id = grids.size() + 1;
    grids.emplace(id, *grid);
    planner.set_lists(id);
  }
  EXPECT_FALSE(planner.wants_lists());
}
void prepare(CopyPlanner& planner, Grids& grids) {
  prepare(planner, grids, [] { return false; });
}

// In order of the local addresses, and joined where they go on.
std::vector<CopyRun> normal(std::vector<CopyRun> runs) {
  std::ranges::sort(runs, {}, &CopyRun::local_address);
  return joined(runs);
}

std::vector<CopyRun> from_lists(const CopyBatch& batch, const Grids& grids) {
  std::vector<CopyRun> runs;
  const auto grid = grids.find(batch.lists);
  EXPECT_NE(grid, grids.end());
  EXPECT_EQ(batch.local_blocks.size(), batch.remote_blocks.size());
  EXPECT_TRUE(batch.runs.empty());
  for (std::size_t i = 0; i < batch.local_blocks.size(); ++i) {
    const auto local = static_cast<std::uint32_t>(batch.local_blocks[i]);
    const auto remote = static_cast<std::uint32_t>(batch.remote_blocks[i]);
    EXPECT_LT(local, grid->second.local.size());
    EXPECT_LT(remote, grid->second.remote.size());
    runs.push_back({grid->second.local.address(local), grid->second.remote.address(remote),
                    grid->second.block_bytes});
  }
  return runs;
}

struct Posted {
  std::vector<CopyRun> runs;  // all that is copied
  std::size_t listed = 0;     // parts from lists
  std::size_t others = 0;
  bool adjoining = false;
};

// All parts as the Poster posts them. Those from lists must say what their runs say.
Posted post(PatternPlan plan, const PlanParts::Limits& limits, const Grids& grids) {
  PlanParts parts;
  parts.assign(std::move(plan), limits);
  Posted posted;
  PartBuffers buffers;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const CopyBatch batch = parts.spell_out(part, buffers.runs);
    std::vector<CopyRun> runs(batch.runs.begin(), batch.runs.end());
    EXPECT_EQ(parts.measure(part).runs, runs.size());
    EXPECT_LE(runs.size(), limits.runs);
    std::uint64_t bytes = 0;
    for (const CopyRun& run : runs)
      bytes += run.length;
    EXPECT_EQ(parts.measure(part).bytes, bytes);
    EXPECT_LE(bytes, limits.bytes);
    if (parts.lists(part) != 0) {
      const CopyBatch blocks = parts.spell_blocks(part, buffers);
      const std::vector<CopyRun> listed = from_lists(blocks, grids);
      EXPECT_EQ(normal(listed), normal(runs)) << "part " << part;
      EXPECT_EQ(blocks.adjoining, listed.size() > runs.size());
      posted.adjoining |= blocks.adjoining;
      runs = listed;
    }
    ++(parts.lists(part) != 0 ? posted.listed : posted.others);
    posted.runs.insert(posted.runs.end(), runs.begin(), runs.end());
  }
  return posted;
}

// A request and what is copied for it before there are lists and after.
struct Request {
  TokenSpan span;
  BlockTable local;
  BlockTable remote;
  PlanParts::Limits limits = kNoLimits;
};

Request scattered(TokenSpan span, std::uint32_t local_pool, std::uint32_t remote_pool,
                  std::uint32_t seed) {
  std::mt19937 random{seed};
  Request request;
  request.span = span;
  request.local = {{0, some_blocks(local_pool, 300, random)}};
  request.remote = {{0, some_blocks(remote_pool, 300, random)}};
  return request;
}

template <typename Refuse>
Posted compare(CopyPlanner& planner, const Request& request, Grids& grids, const Refuse& refuse) {
  const auto copy = [&] {
    return post(plan_of(planner, request.span, request.local, request.remote), request.limits,
                grids);
  };
  const Posted before = copy();
  EXPECT_EQ(before.listed, 0U);
  prepare(planner, grids, refuse);
  Posted after = copy();
  EXPECT_EQ(normal(after.runs), normal(before.runs));
  return after;
}
Posted compare(CopyPlanner& planner, const Request& request, Grids& grids) {
  return compare(planner, request, grids, [] { return false; });
}

TEST(CopyPlanLists, ScatteredBlocksComeFromThemOnceTheyArePrepared) {
  CopyPlanner planner = make_planner({}, {}, {});
  Grids grids;
  const Posted posted = compare(planner, scattered({0, 4'800}, 1'000, 1'000, 1), grids);
  EXPECT_EQ(posted.listed, 1U);
  EXPECT_EQ(posted.others, 0U);
  ASSERT_EQ(grids.size(), 1U);
  EXPECT_EQ(grids.at(1).local.size(), 8'000U);
  EXPECT_EQ(grids.at(1).block_bytes, 16 * kTokenBytes);
}

TEST(CopyPlanLists, PartsOfBlocksGoBesideThem) {
  CopyPlanner planner = make_planner({}, {}, {});
  Grids grids;
  const Posted posted = compare(planner, scattered({5, 4'790}, 1'000, 1'000, 2), grids);
  EXPECT_EQ(posted.listed, 1U);
  EXPECT_EQ(posted.others, 1U);
}

TEST(CopyPlanLists, KeysAndValuesInHalvesAreBlocksOfOneRow) {
  CopyPlanner planner = make_planner({.halves = true}, {.blocks = 1'200, .halves = true}, {});
  Grids grids;
  const Posted posted = compare(planner, scattered({5, 4'790}, 1'000, 1'200, 9), grids);
  EXPECT_EQ(posted.listed, 1U);
  EXPECT_EQ(posted.others, 1U);
  ASSERT_EQ(grids.size(), 1U);
  EXPECT_EQ(grids.at(1).local.num_blocks, 2'000U);
  EXPECT_EQ(grids.at(1).remote.num_blocks, 2'400U);
}

TEST(CopyPlanLists, FewOrAdjoiningBlocksDoWithout) {
  std::mt19937 random{3};  // NOLINT: the same in each run
  CopyPlanner planner = make_planner({}, {}, {.min_descriptors = 8 * 20});
  std::vector<BlockId> rising(500);
  std::iota(rising.begin(), rising.end(), 7U);
  plan_of(planner, {0, 8'000}, {{0, rising}}, {{0, rising}});
  EXPECT_FALSE(planner.wants_lists());
  const BlockTable few{{0, some_blocks(1'000, 19, random)}};
  const BlockTable others{{0, some_blocks(1'000, 19, random)}};
  plan_of(planner, {0, 19 * 16}, few, others);
  EXPECT_FALSE(planner.wants_lists());
  const BlockTable enough{{0, some_blocks(1'000, 22, random)}};
  const BlockTable enough_too{{0, some_blocks(1'000, 22, random)}};
  plan_of(planner, {0, 22 * 16}, enough, enough_too);
  EXPECT_TRUE(planner.wants_lists());
  // Those that have them once need not use them always.
  Grids grids;
  prepare(planner, grids);
  const PatternPlan plan = plan_of(planner, {0, 8'000}, {{0, rising}}, {{0, rising}});
  EXPECT_EQ(post(plan, kNoLimits, grids).listed, 0U);
}

TEST(CopyPlanLists, LongRunsOfBlocksDoWithout) {
  for (const std::uint32_t length : {4U, 5U}) {
    CopyPlanner planner = make_planner({}, {}, {.min_descriptors = 1});
    std::vector<BlockId> ids;
    for (BlockId run = 0; run < 40; ++run) {
      for (BlockId i = 0; i < length; ++i)
        ids.push_back(run * 10 + i);
    }
    const auto tokens = static_cast<std::uint32_t>(ids.size()) * 16;
    const PatternPlan plan = plan_of(planner, {0, tokens}, {{0, ids}}, {{0, ids}});
    EXPECT_EQ(plan.runs.size(), 40U);
    EXPECT_EQ(planner.wants_lists(), length == 4);
  }
}

TEST(CopyPlanLists, BlocksOfDifferentSizesDoWithout) {
  std::mt19937 random{4};  // NOLINT: the same in each run
  CopyPlanner planner = make_planner({.tokens = 16}, {.tokens = 32}, {.min_descriptors = 1});
  plan_of(planner, {0, 3'200}, {{0, some_blocks(1'000, 200, random)}},
          {{0, some_blocks(1'000, 100, random)}});
  EXPECT_FALSE(planner.wants_lists());
}

TEST(CopyPlanLists, TheyComeInPiecesOfBoundedSize) {
  std::mt19937 random{5};  // NOLINT: the same in each run
  const BlockTable local{{0, some_blocks(1'000, 300, random)}};
  const BlockTable remote{{0, some_blocks(1'000, 300, random)}};
  const auto pieces = [&](std::uint32_t max_blocks) {
    CopyPlanner planner = make_planner({}, {.blocks = 1'100}, {1, max_blocks});
    plan_of(planner, {0, 4'800}, local, remote);
    Grids grids;
    prepare(planner, grids);
    for (const auto& [id, grid] : grids) {
      EXPECT_EQ(grid.local.bases.size(), grid.remote.bases.size());
      EXPECT_LE(grid.remote.size(), std::max(max_blocks, 1'100U));
    }
    return grids.size();
  };
  EXPECT_EQ(pieces(100'000), 1U);
  EXPECT_EQ(pieces(3 * 1'100), 3U);
  EXPECT_EQ(pieces(2 * 1'100 - 1), 8U);
  EXPECT_EQ(pieces(600), 8U);  // one base is as little as can be
  EXPECT_EQ(pieces(500), 0U);  // but not any number of blocks
}

// A region of one block need have no stride: nothing tells its blocks apart.
TEST(CopyPlanLists, BlocksWithoutADistanceDoWithout) {
  for (const bool local_is_producer : {true, false}) {
    for (const bool theirs : {true, false}) {
      std::vector<Region> from = make_rank(kProducerBase, {.layers = 300, .blocks = 400});
      std::vector<Region> to = make_rank(kConsumerBase, {.layers = 300, .blocks = 400});
      for (Region& region : theirs ? to : from) {
        region.num_blocks = 1;
        region.block_stride = 0;
      }
      const Result<Assignment> assigned = assign_writers({&from, 1}, {&to, 1});
      ASSERT_TRUE(assigned.is_ok()) << assigned.message();
      CopyPlanner planner(local_is_producer ? from : to, local_is_producer ? to : from,
                          assigned.value().pairs(0, 0), local_is_producer);
      for (int round = 0; round < 2; ++round) {
        const PatternPlan plan = plan_of(planner, {0, 16}, {{0, {0}}}, {{0, {0}}});
        EXPECT_FALSE(planner.wants_lists());
        EXPECT_EQ(post(plan, kNoLimits, {}).runs.size(), 300U);
      }
    }
  }
}

TEST(CopyPlanLists, ARuleWithoutALeastStillNeedsBlocksThatFit) {
  CopyPlanner planner = make_planner({}, {}, {.min_descriptors = 0, .max_blocks = 100});
  plan_of(planner, {0, 48}, {{0, {5, 3, 1}}}, {{0, {2, 9, 4}}});
  EXPECT_FALSE(planner.wants_lists());
}

TEST(CopyPlanLists, WhereOneCantBeHadTheRestIsNotTried) {
  CopyPlanner planner = make_planner({}, {}, {1, 2'000});
  Grids grids;
  int asked = 0;
  const Posted posted = compare(planner, scattered({5, 4'790}, 1'000, 1'000, 6), grids,
                                [&asked] { return ++asked == 3; });
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(grids.size(), 2U);  // of four
  EXPECT_EQ(posted.listed, 2U);
  EXPECT_FALSE(planner.wants_lists());
}

// A random pair of ranks, request and limits, planned without lists and with all or some of them.
void compare_with_and_without(std::uint32_t seed, std::size_t& listed, std::size_t& adjoining) {
  std::mt19937 random{seed};
  const auto upto = [&random](std::uint32_t n) {
    return static_cast<std::uint32_t>(random() % n) + 1;
  };
  Side producer{.layers = upto(9), .blocks = 30 + upto(60), .tokens = upto(4) * 4};
  producer.two_classes = upto(2) == 1;
  producer.halves = upto(2) == 1;
  Side consumer = producer;
  consumer.blocks = 30 + upto(60);
  if (upto(3) == 1) producer.gap = kTokenBytes * upto(3);
  if (upto(3) == 1) consumer.gap = kTokenBytes * upto(3);
  const bool local_is_producer = upto(2) == 1;
  const std::uint32_t blocks = upto(30);
  std::vector<BlockId> from = some_blocks(producer.blocks, blocks, random);
  std::vector<BlockId> to = some_blocks(consumer.blocks, blocks, random);
  // Some of them in a row on both sides.
  for (std::uint32_t i = 1; i < blocks; ++i) {
    const bool free_ids = std::ranges::find(from, from[i - 1] + 1) == from.end() &&
                          std::ranges::find(to, to[i - 1] + 1) == to.end();
    if (free_ids && from[i - 1] + 1 < producer.blocks && to[i - 1] + 1 < consumer.blocks &&
        upto(2) == 1) {
      from[i] = from[i - 1] + 1;
      to[i] = to[i - 1] + 1;
    }
  }
  if (upto(4) == 1) to[upto(blocks) - 1] = kNoBlock;
  const std::uint32_t begin = upto(producer.tokens * 2) - 1;
  Request request;
  request.span = {begin, std::max(begin, blocks * producer.tokens - upto(producer.tokens) + 1)};
  request.local = {{0, local_is_producer ? from : to}};
  request.remote = {{0, local_is_producer ? to : from}};
  request.limits = {upto(40), upto(3) == 1 ? kTokenBytes * upto(100) : 1U << 30};

  CopyPlanner planner = make_planner(producer, consumer, {upto(20), upto(400)}, local_is_producer);
  Grids grids;
  const Posted posted = compare(planner, request, grids, [&] { return upto(8) == 1; });
  listed += posted.listed;
  adjoining += posted.adjoining ? 1 : 0;
}

TEST(CopyPlanLists, CopyWhatThePlanWithoutThemCopies) {
  std::size_t listed = 0;
  std::size_t adjoining = 0;
  for (std::uint32_t seed = 0; seed < 3'000 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    compare_with_and_without(seed, listed, adjoining);
  }
  EXPECT_GT(listed, 1'000U);
  EXPECT_GT(adjoining, 100U);
}

}  // namespace
}  // namespace kvpush
