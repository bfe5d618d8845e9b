#include "copy_plan.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "copy_plan_parts.h"
#include "support/allocations.h"
#include "support/runs.h"

namespace kvpush {
namespace {

constexpr std::uint32_t kBlocks = 64;
constexpr std::uint64_t kElement = 32;
constexpr std::uint64_t kProducerBase = std::uint64_t{1} << 40;
constexpr std::uint64_t kConsumerBase = std::uint64_t{1} << 50;
constexpr std::uint64_t kLayerStep = std::uint64_t{1} << 36;

enum class Order { kTokenMajor, kHeadMajor };

struct Form {
  Order order = Order::kTokenMajor;
  std::uint32_t tokens = 16;
  std::uint32_t first_head = 0;
  std::uint32_t heads = 4;
  std::uint32_t total_heads = 4;
  std::uint32_t blocks = kBlocks;
};

Region make_region(const std::string& layer, std::uint64_t base, const Form& form) {
  Region region;
  region.layer = layer;
  region.dtype = "bfloat16";
  region.base = base;
  region.num_blocks = form.blocks;
  region.tokens_per_block = region.tokens_per_page = form.tokens;
  region.first_head = form.first_head;
  region.heads = form.heads;
  region.total_heads = form.total_heads;
  region.element_bytes = kElement;
  const bool token_major = form.order == Order::kTokenMajor;
  region.token_stride = kElement * (token_major ? form.heads : 1);
  region.head_stride = kElement * (token_major ? 1 : form.tokens);
  region.block_stride = kElement * form.heads * form.tokens;
  return region;
}

std::vector<Region> make_rank(std::uint64_t base, int layers, const Form& form) {
  std::vector<Region> regions;
  for (int i = 0; i < layers; ++i) {
    regions.push_back(make_region("layer." + std::to_string(i),
                                  base + static_cast<unsigned>(i) * kLayerStep, form));
  }
  return regions;
}

using Rank = std::vector<Region>;

std::vector<RegionPair> pairs_of(const Rank& producer, const Rank& consumer) {
  const std::vector<Rank> from{producer};
  const std::vector<Rank> to{consumer};
  const Result<Assignment> assignment = assign_writers(from, to);
  EXPECT_TRUE(assignment.is_ok()) << assignment.message();
  return assignment.is_ok() ? assignment.value().pairs(0, 0) : std::vector<RegionPair>{};
}

CopyPlanner make_planner(const Rank& producer, const Rank& consumer) {
  return {producer, consumer, pairs_of(producer, consumer), true};
}

BlockTable table(std::vector<BlockId> ids, std::uint32_t first = 0) {
  return {GroupBlocks{first, std::move(ids)}};
}

std::vector<BlockId> rising(BlockId from, std::uint32_t count) {
  std::vector<BlockId> ids(count);
  std::iota(ids.begin(), ids.end(), from);
  return ids;
}

std::vector<BlockId> falling(BlockId from, std::uint32_t count) {
  std::vector<BlockId> ids = rising(from, count);
  std::reverse(ids.begin(), ids.end());
  return ids;
}

CopyPlan plan_of(const Rank& producer, const Rank& consumer, TokenSpan span, const BlockTable& from,
                 const BlockTable& to) {
  CopyPlanner planner = make_planner(producer, consumer);
  CopyPlan plan;
  const Status status = planner.plan(span, from, to, plan);
  EXPECT_TRUE(status.is_ok()) << status.message();
  return plan;
}

std::string refusal(const Rank& producer, const Rank& consumer, TokenSpan span,
                    const BlockTable& from, const BlockTable& to) {
  CopyPlanner planner = make_planner(producer, consumer);
  CopyPlan plan;
  plan.runs.push_back({});  // left over: must be gone whatever happens
  const Status status = planner.plan(span, from, to, plan);
  EXPECT_FALSE(status.is_ok());
  EXPECT_TRUE(plan.runs.empty() && plan.batches.empty() && plan.bytes == 0);
  return status.message();
}

// One layer on either side.
struct Pair {
  Rank producer;
  Rank consumer;
};

Pair one_layer(const Form& producer = {}, const Form& consumer = {}) {
  return {make_rank(kProducerBase, 1, producer), make_rank(kConsumerBase, 1, consumer)};
}

// ---- coalescing ------------------------------------------------------------------------------

TEST(CopyPlan, EqualLayoutsAndConsecutiveBlocksMakeOneRunForEachLayer) {
  const Rank producer = make_rank(kProducerBase, 3, {});
  const Rank consumer = make_rank(kConsumerBase, 3, {});
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 160}, table(rising(4, 10)), table(rising(20, 10)));
  const std::uint64_t block = producer[0].block_stride;
  ASSERT_EQ(plan.runs.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(plan.runs[i],
              (CopyRun{producer[i].base + 4 * block, consumer[i].base + 20 * block, 10 * block}));
  }
  EXPECT_EQ(plan.bytes, 30 * block);
  EXPECT_EQ(plan.descriptors_before, 30U);
  ASSERT_EQ(plan.batches.size(), 1U);
  EXPECT_EQ(plan.batches[0].end, 3U);
}

TEST(CopyPlan, ThePulledPlanIsThePushedOneSeenFromTheOtherSide) {
  const auto [producer, consumer] =
      one_layer({.heads = 2, .total_heads = 2}, {.heads = 2, .total_heads = 2});
  const auto pairs = pairs_of(producer, consumer);
  CopyPlanner push(producer, consumer, pairs, true);
  CopyPlanner pull(consumer, producer, pairs, false);
  CopyPlan pushed;
  CopyPlan pulled;
  const BlockTable from = table({3, 9, 5});
  const BlockTable to = table({1, 2, 40});
  ASSERT_TRUE(push.plan({5, 40}, from, to, pushed).is_ok());
  ASSERT_TRUE(pull.plan({5, 40}, to, from, pulled).is_ok());
  ASSERT_EQ(pushed.runs.size(), pulled.runs.size());
  for (std::size_t i = 0; i < pushed.runs.size(); ++i) {
    EXPECT_EQ(pushed.runs[i].local_address, pulled.runs[i].remote_address);
    EXPECT_EQ(pushed.runs[i].remote_address, pulled.runs[i].local_address);
  }
}

TEST(CopyPlan, PartialBlocksAtBothEndsJoinTheRun) {
  const auto [producer, consumer] = one_layer();
  const CopyPlan plan =
      plan_of(producer, consumer, {3, 45}, table(rising(0, 3)), table(rising(7, 3)));
  ASSERT_EQ(plan.runs.size(), 1U);
  EXPECT_EQ(plan.runs[0].length, 42U * 4 * kElement);
}

TEST(CopyPlan, BlocksThatFallOnBothSidesMerge) {
  const auto [producer, consumer] = one_layer();
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 160}, table(falling(4, 10)), table(falling(20, 10)));
  EXPECT_EQ(plan.runs.size(), 1U);
}

TEST(CopyPlan, BlocksThatFallOnOneSideOnlyStayApart) {
  const auto [producer, consumer] = one_layer();
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 160}, table(falling(4, 10)), table(rising(20, 10)));
  EXPECT_EQ(plan.runs.size(), 10U);
}

TEST(CopyPlan, ShuffledPairsOfOneShiftMerge) {
  const auto [producer, consumer] = one_layer({.blocks = 2'000}, {.blocks = 2'000});
  for (const std::uint32_t count : {20U, 1'000U}) {  // both ways of sorting
    std::vector<BlockId> from = rising(3, count);
    std::shuffle(from.begin(), from.end(), std::mt19937(7));  // NOLINT: the same in each run
    std::vector<BlockId> to = from;
    for (BlockId& id : to)
      id += 900;
    const CopyPlan plan = plan_of(producer, consumer, {0, count * 16}, table(from), table(to));
    EXPECT_EQ(plan.runs.size(), 1U) << count;
  }
}

TEST(CopyPlan, LayersInsideABlockMergeWithThemselvesAndWithTheNextBlock) {
  Form form;
  Rank producer = make_rank(kProducerBase, 4, form);
  Rank consumer = make_rank(kConsumerBase, 4, form);
  const std::uint64_t content = producer[0].block_stride;
  for (Rank* rank : {&producer, &consumer}) {
    for (std::size_t i = 0; i < 4; ++i) {
      (*rank)[i].base = (*rank)[0].base + i * content;
      (*rank)[i].block_stride = 4 * content;
    }
  }
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 64}, table({1, 2, 3, 9}), table({5, 6, 7, 8}));
  EXPECT_EQ(plan.runs.size(), 2U);
  EXPECT_EQ(plan.descriptors_before, 16U);
  EXPECT_EQ(plan.bytes, 16 * content);
}

TEST(CopyPlan, LayersJoinOnlyAsFarAsTheyAreEquallyFarOnBothSides) {
  Rank producer = make_rank(kProducerBase, 3, {});
  Rank consumer = make_rank(kConsumerBase, 3, {});
  const std::uint64_t content = producer[0].block_stride;
  const std::uint64_t straight[] = {0, 1, 2};
  const std::uint64_t gap[] = {0, 1, 3};
  for (const bool gap_at_producer : {false, true}) {
    for (std::size_t i = 0; i < 3; ++i) {
      producer[i].base = kProducerBase + (gap_at_producer ? gap : straight)[i] * content;
      consumer[i].base = kConsumerBase + (gap_at_producer ? straight : gap)[i] * content;
      producer[i].block_stride = consumer[i].block_stride = 4 * content;
    }
    const CopyPlan plan = plan_of(producer, consumer, {0, 16}, table({0}), table({0}));
    ASSERT_EQ(plan.runs.size(), 2U);
    const CopyRun two{producer[0].base, consumer[0].base, 2 * content};
    const CopyRun one{producer[2].base, consumer[2].base, content};
    EXPECT_EQ(std::count(plan.runs.begin(), plan.runs.end(), two), 1);
    EXPECT_EQ(std::count(plan.runs.begin(), plan.runs.end(), one), 1);
  }
}

TEST(CopyPlan, KeysAndValuesInHalvesMakeTwoRuns) {
  auto [producer, consumer] = one_layer();
  for (Rank* rank : {&producer, &consumer}) {
    (*rank)[0].components = 2;
    (*rank)[0].component_stride = (*rank)[0].block_stride * kBlocks;
  }
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 40}, table(rising(0, 3)), table(rising(7, 3)));
  EXPECT_EQ(plan.runs.size(), 2U);
  EXPECT_EQ(plan.descriptors_before, 6U);
}

TEST(CopyPlan, AWholePoolIsOneRunEvenInHalves) {
  auto [producer, consumer] = one_layer({.blocks = 3}, {.blocks = 3});
  for (Rank* rank : {&producer, &consumer}) {
    (*rank)[0].components = 2;
    (*rank)[0].component_stride = (*rank)[0].block_stride * 3;
  }
  const CopyPlan plan = plan_of(producer, consumer, {0, 48}, table({2, 0, 1}), table({2, 0, 1}));
  EXPECT_EQ(plan.runs.size(), 1U);
}

TEST(CopyPlan, BlockSizesThatDifferStillMerge) {
  const auto [producer, consumer] = one_layer({.tokens = 32}, {.tokens = 48});
  const CopyPlan plan =
      plan_of(producer, consumer, {5, 200}, table(rising(3, 7)), table(rising(9, 5)));
  EXPECT_EQ(plan.runs.size(), 1U);
  EXPECT_EQ(plan.bytes, 195U * 4 * kElement);
}

TEST(CopyPlan, PagesThatMakeNoDifferenceAreNoLimit) {
  auto [producer, consumer] = one_layer({.tokens = 32}, {.tokens = 32});
  producer[0].tokens_per_page = 8;
  producer[0].page_stride = 8 * producer[0].token_stride;
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 96}, table(rising(3, 3)), table(rising(9, 3)));
  EXPECT_EQ(plan.runs.size(), 1U);
}

TEST(CopyPlan, PagesOfOneTokenMerge) {
  auto [producer, consumer] = one_layer();
  producer[0].tokens_per_page = 1;
  producer[0].page_stride = producer[0].token_stride;
  producer[0].token_stride = 0;
  const CopyPlan plan =
      plan_of(producer, consumer, {1, 40}, table(rising(3, 3)), table(rising(9, 3)));
  EXPECT_EQ(plan.runs.size(), 1U);
}

TEST(CopyPlan, EqualPagesOfHeadMajorContentMerge) {
  auto [producer, consumer] = one_layer({.order = Order::kHeadMajor, .tokens = 32},
                                        {.order = Order::kHeadMajor, .tokens = 32});
  for (Rank* rank : {&producer, &consumer}) {
    (*rank)[0].tokens_per_page = 8;
    (*rank)[0].page_stride = 8 * 4 * kElement;
    (*rank)[0].head_stride = 8 * kElement;
  }
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 96}, table(rising(3, 3)), table(rising(9, 3)));
  EXPECT_EQ(plan.runs.size(), 1U);
}

// ---- the address arithmetic ------------------------------------------------------------------

TEST(CopyPlan, AHeadOfATokenIsFoundInEitherOrder) {
  const auto [producer, consumer] =
      one_layer({.order = Order::kTokenMajor}, {.order = Order::kHeadMajor});
  const CopyPlan plan = plan_of(producer, consumer, {17, 18}, table({0, 6}), table({0, 11}));
  ASSERT_EQ(plan.runs.size(), 4U);
  const Region& from = producer[0];
  const Region& to = consumer[0];
  for (std::uint64_t head = 0; head < 4; ++head) {
    const CopyRun run{from.base + 6 * from.block_stride + from.token_stride + head * kElement,
                      to.base + 11 * to.block_stride + kElement + head * to.head_stride, kElement};
    EXPECT_EQ(std::count(plan.runs.begin(), plan.runs.end(), run), 1) << head;
  }
}

TEST(CopyPlan, BeyondFourGigabytesAndTwoHundredThousandBlocks) {
  Form form{.tokens = 64, .heads = 16, .total_heads = 16, .blocks = 200'000};
  const auto [producer, consumer] = one_layer(form, form);
  const std::uint64_t block = producer[0].block_stride;
  ASSERT_GT(block * 199'999, std::uint64_t{1} << 31);
  const CopyPlan last = plan_of(producer, consumer, {0, 64}, table({199'999}), table({199'998}));
  ASSERT_EQ(last.runs.size(), 1U);
  EXPECT_EQ(last.runs[0].local_address, kProducerBase + 199'999 * block);
  EXPECT_EQ(last.runs[0].remote_address, kConsumerBase + 199'998 * block);
  const CopyPlan all = plan_of(producer, consumer, {0, 64 * 200'000}, table(falling(0, 200'000)),
                               table(falling(0, 200'000)));
  ASSERT_EQ(all.runs.size(), 1U);
  EXPECT_EQ(all.runs[0].length, 200'000 * block);
  EXPECT_GT(all.bytes, std::uint64_t{1} << 32);
}

TEST(CopyPlan, TokensNearTheEndOfTheirRange) {
  constexpr std::uint32_t kEnd = 0xFFFF'FFFFU;
  const auto [producer, consumer] = one_layer();
  const std::uint32_t block = kEnd / 16;
  const CopyPlan plan =
      plan_of(producer, consumer, {kEnd - 3, kEnd}, table({2}, block), table({5}, block));
  ASSERT_EQ(plan.runs.size(), 1U);
  EXPECT_EQ(plan.runs[0].length, 3U * 4 * kElement);
}

TEST(CopyPlan, PackedContentMapsOntoComponentsApart) {
  auto [producer, consumer] = one_layer();
  consumer[0].components = 2;
  consumer[0].component_stride = consumer[0].block_stride * kBlocks;
  producer[0].element_bytes *= 2;
  producer[0].head_stride *= 2;
  producer[0].token_stride *= 2;
  producer[0].block_stride *= 2;
  const CopyPlan plan = plan_of(producer, consumer, {0, 1}, table({0}), table({0}));
  ASSERT_EQ(plan.runs.size(), 8U);
  const CopyRun value_of_head_1{kProducerBase + 3 * kElement,
                                kConsumerBase + consumer[0].component_stride + kElement, kElement};
  EXPECT_EQ(std::count(plan.runs.begin(), plan.runs.end(), value_of_head_1), 1);
}

// ---- what is needed, and what is refused -----------------------------------------------------

TEST(CopyPlan, EmptySpansCopyNothing) {
  const auto [producer, consumer] = one_layer();
  EXPECT_TRUE(plan_of(producer, consumer, {7, 7}, table({}), table({})).runs.empty());
  EXPECT_TRUE(plan_of(producer, consumer, {9, 7}, table({1}), table({1})).runs.empty());
}

TEST(CopyPlan, HolesOfTheConsumerAreSkippedAndNeedNoProducer) {
  const auto [producer, consumer] = one_layer();
  const CopyPlan plan = plan_of(producer, consumer, {0, 64}, table({kNoBlock, 1, kNoBlock, 3}),
                                table({kNoBlock, 5, kNoBlock, 7}));
  EXPECT_EQ(plan.bytes, 2 * producer[0].block_stride);
  const CopyPlan window = plan_of(producer, consumer, {0, 64}, table({3}, 3), table({7}, 3));
  EXPECT_EQ(window.bytes, producer[0].block_stride);
}

TEST(CopyPlan, AHoleOfTheProducerUnderANeededTokenIsRefused) {
  const auto [producer, consumer] = one_layer();
  for (const BlockTable& from :
       {table({1, kNoBlock, 3}), table({1}), table({2, 3}, 2), table({})}) {
    const std::string message = refusal(producer, consumer, {0, 48}, from, table({4, 5, 6}));
    EXPECT_NE(message.find("the producer has no block"), std::string::npos) << message;
  }
  EXPECT_NE(refusal(producer, consumer, {0, 48}, table({1, kNoBlock, 3}), table({4, 5, 6}))
                .find("group 0: the producer has no block 1 "),
            std::string::npos);
}

TEST(CopyPlan, AConsumersListThatEndsBeforeTheSpanIsRefused) {
  const auto [producer, consumer] = one_layer();
  const std::string message = refusal(producer, consumer, {0, 33}, table({1, 2, 3}), table({4, 5}));
  EXPECT_NE(message.find("end at token 32, before the span's end 33"), std::string::npos)
      << message;
}

TEST(CopyPlan, BlockIdsOutOfRangeAreRefusedOnEitherSide) {
  const auto [producer, consumer] = one_layer({.blocks = 8}, {.blocks = 9});
  EXPECT_NE(refusal(producer, consumer, {0, 32}, table({1, 8}), table({1, 8}))
                .find("layer 'layer.0': block id 8 of the producer is out of range, it has 8"),
            std::string::npos);
  EXPECT_NE(refusal(producer, consumer, {0, 32}, table({1, 7}), table({9, 1}))
                .find("block id 9 of the consumer is out of range, it has 9"),
            std::string::npos);
  for (const BlockId id : {0x7FFF'FFFEU, 0x7FFF'FFFFU, 0x8000'0000U, kNoBlock - 1}) {
    const std::string named = "block id " + std::to_string(id) + " of the ";
    EXPECT_NE(refusal(producer, consumer, {0, 48}, table({1, id, 2}), table({1, 2, 3}))
                  .find(named + "producer"),
              std::string::npos);
    EXPECT_NE(refusal(producer, consumer, {0, 48}, table({1, 2, 3}), table({1, id, 2}))
                  .find(named + "consumer"),
              std::string::npos);
  }
}

// The list is as long as a message may name with a few runs.
TEST(CopyPlan, BlockIdsOutOfRangeCostNoMemory) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns the allocator";
  const auto [producer, consumer] = one_layer({.blocks = 1'000}, {.blocks = 1'000});
  std::vector<BlockId> ids = falling(1, 1U << 20);
  ids.back() = 1U << 27;
  const BlockTable bad = table(std::move(ids));
  const BlockTable good = table({1});
  const TokenSpan span{0, 16U << 20};
  CopyPlanner planner = make_planner(producer, consumer);
  PatternPlan plan;
  for (const bool theirs : {true, false}) {
    const std::uint64_t before = allocated_bytes;
    const Status status =
        planner.plan_pattern(span, theirs ? good : bad, theirs ? bad : good, plan);
    EXPECT_NE(status.message().find("block id 134217728"), std::string::npos) << status.message();
    EXPECT_LT(allocated_bytes - before, 100'000U);
  }
}

TEST(CopyPlan, AGroupThatIsNotInTheTableIsRefused) {
  auto [producer, consumer] = one_layer();
  consumer[0].group = 3;
  const std::string message = refusal(producer, consumer, {0, 16}, table({1}), table({1}));
  EXPECT_NE(message.find("consumer has 1 groups, group 3"), std::string::npos) << message;
}

TEST(CopyPlan, TooManyPiecesAreRefused) {
  const Form from{.tokens = 16, .heads = 64, .total_heads = 64, .blocks = 20'000};
  Form to = from;
  to.order = Order::kHeadMajor;
  const auto [producer, consumer] = one_layer(from, to);
  const std::string message = refusal(producer, consumer, {0, 16 * 17'000},
                                      table(rising(0, 17'000)), table(rising(0, 17'000)));
  EXPECT_NE(message.find("plan fewer tokens"), std::string::npos) << message;
}

// ---- states, groups and memory kinds ---------------------------------------------------------

Region state_region(const std::string& layer, std::uint64_t base, std::uint32_t group) {
  Region region;
  region.layer = layer;
  region.kind = RegionKind::kState;
  region.group = group;
  region.dtype = "float32";
  region.base = base;
  region.num_blocks = kBlocks;
  region.block_stride = 512;
  region.state_bytes = 500;
  return region;
}

TEST(CopyPlan, StatesAreCopiedWholeWhateverTheSpan) {
  Rank producer = make_rank(kProducerBase, 1, {});
  Rank consumer = make_rank(kConsumerBase, 1, {});
  producer.push_back(state_region("mamba", 1 << 20, 1));
  consumer.push_back(state_region("mamba", 1 << 21, 1));
  const BlockTable from{{0, {1}}, {0, {7, 8, 9}}};
  const BlockTable to{{0, {2}}, {0, {3, kNoBlock, 4}}};
  CopyPlanner planner = make_planner(producer, consumer);
  CopyPlan plan;
  ASSERT_TRUE(planner.plan({4, 6}, from, to, plan).is_ok());
  ASSERT_EQ(plan.runs.size(), 3U);
  const CopyRun first{(1 << 20) + 7 * 512, (1 << 21) + 3 * 512, 500};
  const CopyRun last{(1 << 20) + 9 * 512, (1 << 21) + 4 * 512, 500};
  EXPECT_EQ(std::count(plan.runs.begin(), plan.runs.end(), first), 1);
  EXPECT_EQ(std::count(plan.runs.begin(), plan.runs.end(), last), 1);
  ASSERT_TRUE(planner.plan({4, 6}, from, to, plan, StateRegions::kLeftOut).is_ok());
  EXPECT_EQ(plan.bytes, 2U * 4 * kElement);
  ASSERT_TRUE(planner.plan({}, from, to, plan).is_ok());
  EXPECT_EQ(plan.bytes, 1'000U);
  const BlockTable short_of_one{{0, {1}}, {0, {7, 8}}};
  EXPECT_FALSE(planner.plan({4, 6}, short_of_one, to, plan).is_ok());
}

// Whichever group's blocks go on from the other's: the runs of two layers never join.
TEST(CopyPlan, EnginesNumberTheirGroupsThemselves) {
  Rank producer = make_rank(kProducerBase, 2, {});
  Rank consumer = make_rank(kConsumerBase, 2, {});
  producer[1].group = 1;
  consumer[0].group = 1;
  const std::uint64_t block = producer[0].block_stride;
  for (const BlockId id : {10U, 12U}) {  // of layer 0; layer 1 has 11
    const CopyPlan plan =
        plan_of(producer, consumer, {0, 16}, {{0, {id}}, {0, {11}}}, {{0, {21}}, {0, {id + 10}}});
    ASSERT_EQ(plan.runs.size(), 2U);
    const CopyRun layer_0{producer[0].base + id * block, consumer[0].base + (id + 10) * block,
                          block};
    const CopyRun layer_1{producer[1].base + 11 * block, consumer[1].base + 21 * block, block};
    EXPECT_EQ(std::count(plan.runs.begin(), plan.runs.end(), layer_0), 1);
    EXPECT_EQ(std::count(plan.runs.begin(), plan.runs.end(), layer_1), 1);
  }
}

TEST(CopyPlan, EachPairOfMemoryKindsIsOneBatch) {
  Rank producer = make_rank(kProducerBase, 6, {});
  Rank consumer = make_rank(kConsumerBase, 6, {});
  for (std::size_t i = 0; i < 6; i += 2)
    producer[i].memory = MemoryKind::kDevice;
  producer[4].device = 1;
  consumer[1].memory = MemoryKind::kDevice;
  const CopyPlan plan = plan_of(producer, consumer, {0, 16}, table({0}), table({0}));
  ASSERT_EQ(plan.batches.size(), 4U);
  std::uint32_t next = 0;
  for (const CopyPlan::Batch& batch : plan.batches) {
    EXPECT_EQ(batch.begin, next);
    next = batch.end;
    for (std::uint32_t i = batch.begin; i < batch.end; ++i) {
      const auto layer =
          static_cast<std::size_t>((plan.runs[i].local_address - kProducerBase) / kLayerStep);
      EXPECT_EQ(batch.local_kind, producer[layer].memory);
      EXPECT_EQ(batch.local_device, producer[layer].device);
      EXPECT_EQ(batch.remote_kind, consumer[layer].memory);
    }
  }
  EXPECT_EQ(next, plan.runs.size());
}

// ---- regions that join up ----------------------------------------------------------------------

constexpr std::uint32_t kElements = kElement / 2;  // of two bytes, in each of a token's K and V

// As CPU attention has it: in each (block, head) the keys as [element][token], then the values as
// [token][element]. `gap` bytes follow each block.
Rank transposed_keys(std::uint64_t base, int layers, const Form& form, std::uint64_t gap = 0) {
  Rank regions;
  const std::uint64_t half = std::uint64_t{form.tokens} * kElement;
  for (int i = 0; i < layers; ++i) {
    Region keys = make_region("keys." + std::to_string(i),
                              base + static_cast<unsigned>(i) * kLayerStep, form);
    keys.head_stride = 2 * half;
    keys.block_stride = form.heads * keys.head_stride + gap;
    Region values = keys;
    keys.components = kElements;
    keys.component_stride = 2ULL * form.tokens;
    keys.token_stride = keys.element_bytes = 2;
    values.layer = "values." + std::to_string(i);
    values.base += half;
    values.token_stride = kElement;
    regions.push_back(keys);
    regions.push_back(values);
  }
  return regions;
}

TEST(CopyPlan, KeysAndValuesThatAreRegionsOfTheirOwnMakeOneRunForEachLayer) {
  const Rank producer = transposed_keys(kProducerBase, 4, {});
  const Rank consumer = transposed_keys(kConsumerBase, 4, {});
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 160}, table(rising(3, 10)), table(rising(20, 10)));
  EXPECT_EQ(plan.runs.size(), 4U);
  EXPECT_EQ(plan.bytes, 4U * 160 * 4 * 2 * kElement);
  EXPECT_EQ(plan.descriptors_before, 4U * 10 * 2);
}

TEST(CopyPlan, KeysAndValuesOfOneHeadOfSeveralJoin) {
  const Rank producer = transposed_keys(kProducerBase, 2, {});
  const Rank consumer = transposed_keys(kConsumerBase, 2, {.first_head = 1, .heads = 2});
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 160}, table(rising(3, 10)), table(rising(20, 10)));
  EXPECT_EQ(plan.runs.size(), 2U * 10);  // both heads of a block in one piece
  EXPECT_EQ(plan.runs.front().length, 2 * 16 * 2 * kElement);
}

TEST(CopyPlan, BlocksWithAGapStayApartButTheirKeysAndValuesJoin) {
  const Rank producer = transposed_keys(kProducerBase, 2, {}, 8);
  const Rank consumer = transposed_keys(kConsumerBase, 2, {});
  const CopyPlan plan =
      plan_of(producer, consumer, {0, 160}, table(rising(3, 10)), table(rising(20, 10)));
  EXPECT_EQ(plan.runs.size(), 2U * 10);
}

TEST(CopyPlan, APartOfABlockOfJoinedRegionsIsCopiedRegionByRegion) {
  const Rank producer = transposed_keys(kProducerBase, 1, {.heads = 1, .total_heads = 1});
  const Rank consumer = transposed_keys(kConsumerBase, 1, {.heads = 1, .total_heads = 1});
  const CopyPlan plan = plan_of(producer, consumer, {0, 21}, table({4, 5}), table({7, 8}));
  // A whole block, which goes on as the next one's first element of five keys; the other elements;
  // the five values.
  ASSERT_EQ(plan.runs.size(), kElements + 1U);
  EXPECT_EQ(plan.runs[0].length, 2U * 16 * kElement + 5 * 2);
  EXPECT_EQ(plan.runs[1].length, 5U * 2);
  EXPECT_EQ(plan.runs.back().length, 5U * kElement);
  EXPECT_EQ(plan.runs.back().local_address, producer[1].base + 5 * producer[1].block_stride);
  EXPECT_EQ(plan.bytes, 21U * 2 * kElement);
}

// ---- cost ------------------------------------------------------------------------------------

TEST(CopyPlan, ASteadyStateAllocatesNothing) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns the allocator";
  for (const Order order : {Order::kTokenMajor, Order::kHeadMajor}) {
    for (const std::uint32_t tokens : {16U, 24U}) {
      const Form from{.blocks = 2'000};
      const Form to{.order = order, .tokens = tokens, .blocks = 2'000};
      const Rank producer = make_rank(kProducerBase, 8, from);
      const Rank consumer = make_rank(kConsumerBase, 8, to);
      CopyPlanner planner = make_planner(producer, consumer);
      std::vector<BlockId> ids = rising(0, 600);
      std::shuffle(ids.begin(), ids.end(), std::mt19937(3));  // NOLINT: the same in each run
      const BlockTable some = table(ids);
      const BlockTable others = table(rising(50, 600));
      CopyPlan plan;
      ASSERT_TRUE(planner.plan({0, 9'600}, others, some, plan).is_ok());
      PatternPlan pattern;
      ASSERT_TRUE(planner.plan_pattern({3, 9'590}, others, some, pattern).is_ok());
      const std::uint64_t before = allocations;
      const Status first = planner.plan({0, 9'600}, others, some, plan);
      const Status second = planner.plan_pattern({40, 8'611}, others, some, pattern);
      EXPECT_EQ(allocations, before);
      EXPECT_TRUE(first.is_ok() && second.is_ok());
    }
  }
}

// ---- plans that are not spelled out ----------------------------------------------------------

// All parts, one after the other; each is within the limits and has one pair of memory kinds.
std::vector<CopyRun> spell_out_all(const PlanParts& parts, const PlanParts::Limits& limits) {
  std::vector<CopyRun> all;
  std::vector<CopyRun> runs;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const CopyBatch batch = parts.spell_out(part, runs);
    EXPECT_LE(batch.runs.size(), limits.runs);
    std::uint64_t bytes = 0;
    for (const CopyRun& run : batch.runs) {
      bytes += run.length;
      EXPECT_EQ(batch.local_kind == MemoryKind::kDevice,
                ((run.local_address - kProducerBase) / kLayerStep) % 2 == 1);
      all.push_back(run);
    }
    EXPECT_LE(bytes, limits.bytes);
  }
  return all;
}

TEST(PlanParts, PartsTogetherAreThePlan) {
  for (const Order order : {Order::kTokenMajor, Order::kHeadMajor}) {
    Rank producer = make_rank(kProducerBase, 7, {});
    const Rank consumer = make_rank(kConsumerBase, 7, {.order = order, .tokens = 24});
    for (std::size_t i = 1; i < 7; i += 2)
      producer[i].memory = MemoryKind::kDevice;
    CopyPlanner planner = make_planner(producer, consumer);
    const BlockTable from = table({4, 5, 6, 9, 8, 20, 21, 22, 1});
    const BlockTable to = table({4, 5, 6, 11, 7, 8});
    CopyPlan plan;
    ASSERT_TRUE(planner.plan({5, 131}, from, to, plan).is_ok());
    for (const std::uint32_t runs : {1U, 2U, 5U, 100U, 100'000U}) {
      for (const std::uint64_t bytes :
           {std::uint64_t{7}, std::uint64_t{1'000}, std::uint64_t{1} << 40}) {
        PatternPlan pattern;
        ASSERT_TRUE(planner.plan_pattern({5, 131}, from, to, pattern).is_ok());
        EXPECT_EQ(pattern.total_runs, plan.runs.size());
        EXPECT_EQ(pattern.bytes, plan.bytes);
        EXPECT_EQ(pattern.descriptors_before, plan.descriptors_before);
        PlanParts parts;
        parts.assign(std::move(pattern), {runs, bytes});
        const std::vector<CopyRun> all = spell_out_all(parts, {runs, bytes});
        EXPECT_EQ(all.size(), parts.plan().total_runs);
        EXPECT_EQ(joined(all), joined(plan.runs)) << runs << " runs, " << bytes << " bytes";
      }
    }
  }
}

TEST(PlanParts, EachPartIsAsFullAsItMayBe) {
  CopyPlanner planner =
      make_planner(make_rank(kProducerBase, 10, {}), make_rank(kConsumerBase, 10, {}));
  PatternPlan pattern;
  ASSERT_TRUE(planner.plan_pattern({0, 48}, table({1, 3, 5}), table({1, 3, 5}), pattern).is_ok());
  EXPECT_EQ(pattern.runs.size(), 3U);
  EXPECT_EQ(pattern.total_runs, 30U);
  PlanParts parts;
  parts.assign(std::move(pattern), {13, std::uint64_t{1} << 40});
  ASSERT_EQ(parts.size(), 3U);  // a part may end within a layer
  std::vector<CopyRun> runs;
  EXPECT_EQ(parts.spell_out(0, runs).runs.size(), 13U);
  EXPECT_EQ(parts.spell_out(1, runs).runs.size(), 13U);
  EXPECT_EQ(parts.spell_out(2, runs).runs.size(), 4U);
  PatternPlan back = parts.take();
  EXPECT_EQ(back.total_runs, 30U);
  EXPECT_EQ(parts.size(), 0U);
}

TEST(PlanParts, GeometriesInTheSameMemoryShareAPart) {
  const auto rank = [](std::uint64_t base) {
    Rank regions = make_rank(base, 6, {});
    for (std::size_t i = 1; i < regions.size(); i += 2)
      regions[i].element_bytes = kElement / 2;
    return regions;
  };
  CopyPlanner planner = make_planner(rank(kProducerBase), rank(kConsumerBase));
  PatternPlan pattern;
  ASSERT_TRUE(planner.plan_pattern({0, 16}, table({1}), table({1}), pattern).is_ok());
  ASSERT_GT(pattern.sections.size(), 1U);
  PlanParts parts;
  parts.assign(std::move(pattern), {1'024, std::uint64_t{1} << 40});
  EXPECT_EQ(parts.size(), 1U);
}

TEST(PlanParts, ARefusedPatternIsEmpty) {
  CopyPlanner planner =
      make_planner(make_rank(kProducerBase, 2, {}), make_rank(kConsumerBase, 2, {}));
  PatternPlan pattern;
  ASSERT_TRUE(planner.plan_pattern({0, 16}, table({1}), table({1}), pattern).is_ok());
  EXPECT_FALSE(planner.plan_pattern({0, 17}, table({1}), table({1, 2}), pattern).is_ok());
  EXPECT_TRUE(pattern.sections.empty() && pattern.runs.empty() && pattern.bytes == 0);
}

// ---- who writes what -------------------------------------------------------------------------

std::vector<Rank> make_ranks(std::uint64_t base, std::uint32_t tp, std::uint32_t total_heads,
                             int layers) {
  std::vector<Rank> ranks;
  for (std::uint32_t rank = 0; rank < tp; ++rank) {
    Form form{.total_heads = total_heads};
    form.heads = std::max(total_heads / tp, 1U);
    form.first_head = rank * total_heads / tp;
    ranks.push_back(make_rank(base, layers, form));
  }
  return ranks;
}

using Heads = std::pair<std::uint32_t, std::uint32_t>;

std::vector<Heads> heads_sent(const Assignment& assignment, std::size_t p, std::size_t c) {
  std::vector<Heads> heads;
  for (const RegionPair& pair : assignment.pairs(p, c)) {
    heads.emplace_back(pair.head_begin, pair.head_end);
  }
  return heads;
}

TEST(AssignWriters, EachConsumerGetsItsHeadsFromTheProducersThatHoldThem) {
  const auto producers = make_ranks(0, 4, 8, 1);
  const auto consumers = make_ranks(0, 2, 8, 1);
  const auto down = assign_writers(producers, consumers);
  ASSERT_TRUE(down.is_ok()) << down.message();
  EXPECT_EQ(heads_sent(down.value(), 2, 1), (std::vector<Heads>{{4, 6}}));
  EXPECT_EQ(heads_sent(down.value(), 2, 0), (std::vector<Heads>{}));
  const auto up = assign_writers(consumers, producers);
  ASSERT_TRUE(up.is_ok()) << up.message();
  EXPECT_EQ(heads_sent(up.value(), 1, 2), (std::vector<Heads>{{4, 6}}));
  EXPECT_EQ(heads_sent(up.value(), 0, 2), (std::vector<Heads>{}));
}

TEST(AssignWriters, ReplicatedHeadsAreSentOnceAndTheLoadIsShared) {
  // 2 heads on 8 ranks: 4 producers hold each. For one consumer they share the layers.
  const auto assignment = assign_writers(make_ranks(0, 8, 2, 8), make_ranks(0, 1, 2, 8));
  ASSERT_TRUE(assignment.is_ok());
  for (std::size_t p = 0; p < 8; ++p) {
    const auto& pairs = assignment.value().pairs(p, 0);
    ASSERT_EQ(pairs.size(), 2U) << p;
    EXPECT_EQ(pairs[0].head_begin, p / 4);
    EXPECT_EQ(pairs[0].consumer_region + 1, pairs[1].consumer_region);  // neighbours stay together
  }
  // As many consumers as producers: each has one writer, its own number.
  const auto same = assign_writers(make_ranks(0, 8, 2, 8), make_ranks(0, 8, 2, 8));
  ASSERT_TRUE(same.is_ok());
  for (std::size_t p = 0; p < 8; ++p) {
    for (std::size_t c = 0; c < 8; ++c) {
      EXPECT_EQ(same.value().pairs(p, c).size(), p == c ? 8U : 0U) << p << " " << c;
    }
  }
  // More consumers than producers: each producer serves as many.
  const auto more = assign_writers(make_ranks(0, 2, 1, 8), make_ranks(0, 6, 1, 8));
  ASSERT_TRUE(more.is_ok());
  for (std::size_t c = 0; c < 6; ++c) {
    EXPECT_EQ(more.value().pairs(c / 3, c).size(), 8U) << c;
  }
}

TEST(AssignWriters, PipelineStagesSendTheLayersTheyHave) {
  Rank all = make_rank(0, 4, {});
  const std::vector<Rank> stages{{all[0], all[1]}, {all[2], all[3]}};
  const std::vector<Rank> whole{all};
  const auto in = assign_writers(stages, whole);
  ASSERT_TRUE(in.is_ok());
  EXPECT_EQ(in.value().pairs(1, 0), (std::vector<RegionPair>{{0, 2, 0, 4}, {1, 3, 0, 4}}));
  const std::vector<Rank> uneven{{all[0], all[1], all[2]}, {all[3]}};
  const auto across = assign_writers(stages, uneven);
  ASSERT_TRUE(across.is_ok());
  EXPECT_EQ(across.value().pairs(0, 1).size(), 0U);
  EXPECT_EQ(across.value().pairs(1, 0), (std::vector<RegionPair>{{0, 2, 0, 4}}));
}

TEST(AssignWriters, SharesThatOverlapUnevenlyAreCutWhereTheyEnd) {
  const std::vector<Rank> producers{
      make_rank(0, 1, {.first_head = 0, .heads = 3, .total_heads = 8}),
      make_rank(0, 1, {.first_head = 0, .heads = 5, .total_heads = 8}),
      make_rank(0, 1, {.first_head = 4, .heads = 4, .total_heads = 8})};
  const auto assignment = assign_writers(producers, make_ranks(0, 1, 8, 1));
  ASSERT_TRUE(assignment.is_ok()) << assignment.message();
  std::vector<int> sent(8);
  for (std::size_t p = 0; p < 3; ++p) {
    const Region& region = producers[p][0];
    for (const auto& [begin, end] : heads_sent(assignment.value(), p, 0)) {
      EXPECT_GE(begin, region.first_head);
      EXPECT_LE(end, region.first_head + region.heads);
      for (std::uint32_t head = begin; head < end; ++head)
        ++sent[head];
    }
  }
  EXPECT_EQ(sent, std::vector<int>(8, 1));
}

std::string refused(const std::vector<Rank>& producers, const std::vector<Rank>& consumers) {
  const auto assignment = assign_writers(producers, consumers);
  EXPECT_FALSE(assignment.is_ok());
  return assignment.message();
}

TEST(AssignWriters, LayersOnOneSideOnlyAreNamed) {
  const std::vector<Rank> four{make_rank(0, 4, {})};
  const std::vector<Rank> two{make_rank(0, 2, {})};
  EXPECT_EQ(refused(four, two), "layers: 2 on the producer only: 'layer.2', 'layer.3'");
  EXPECT_EQ(refused(two, four), "layers: 2 on the consumer only: 'layer.2', 'layer.3'");
  const std::vector<Rank> ten{make_rank(0, 10, {})};
  EXPECT_EQ(refused(ten, two),
            "layers: 8 on the producer only: 'layer.2', 'layer.3', 'layer.4', 'layer.5' and more");
}

TEST(AssignWriters, DifferencesNameTheFieldAndBothValues) {
  const auto say = [](void (*change)(Region&)) {
    std::vector<Rank> producers{make_rank(0, 1, {})};
    change(producers[0][0]);
    return refused(producers, {make_rank(0, 1, {})});
  };
  EXPECT_EQ(say([](Region& r) { r.dtype = "fp8"; }),
            "layer 'layer.0': dtype is 'fp8' on the producer and 'bfloat16' on the consumer");
  EXPECT_EQ(say([](Region& r) { r.total_heads = 8; }),
            "layer 'layer.0': total_heads is 8 on the producer and 4 on the consumer");
  EXPECT_EQ(say([](Region& r) { r.element_bytes = 16; }),
            "layer 'layer.0': components x element_bytes is 1 x 16 on the producer and 1 x 32 on "
            "the consumer");
  EXPECT_EQ(say([](Region& r) { r = state_region("layer.0", 0, 0); }),
            "layer 'layer.0': kind is state on the producer and attention on the consumer");
}

TEST(AssignWriters, HeadsNobodyHoldsAreRefused) {
  std::vector<Rank> producers = make_ranks(0, 4, 8, 1);
  producers.erase(producers.begin() + 1);
  EXPECT_EQ(refused(producers, make_ranks(0, 1, 8, 1)),
            "layer 'layer.0': heads: no producer rank holds 2 to 3, which consumer rank 0 needs");
}

TEST(AssignWriters, BadRegionsAreRefusedWithTheirRank) {
  std::vector<Rank> consumers = make_ranks(0, 2, 4, 2);
  consumers[1][1].block_stride = 1;
  const std::string message = refused(make_ranks(0, 1, 4, 2), consumers);
  EXPECT_EQ(message.rfind("consumer rank 1: region 1 (layer 'layer.1'): block_stride is 1", 0), 0U)
      << message;
  consumers = make_ranks(0, 2, 4, 2);
  consumers[1][1].layer = "layer.0";
  EXPECT_EQ(refused(make_ranks(0, 1, 4, 2), consumers),
            "consumer rank 1: layer 'layer.0' is declared twice");
}

TEST(AssignWriters, SplitStatesGoRankToRank) {
  const std::vector<Rank> two{{state_region("mamba", 0, 0)}, {state_region("mamba", 0, 0)}};
  const std::vector<Rank> one{{state_region("mamba", 0, 0)}};
  const auto straight = assign_writers(two, two);
  ASSERT_TRUE(straight.is_ok());
  EXPECT_EQ(straight.value().pairs(1, 1).size(), 1U);
  EXPECT_EQ(straight.value().pairs(0, 1).size(), 0U);
  EXPECT_EQ(refused(two, one),
            "layer 'mamba': ranks that share a state is 2 on the producer and 1 on the consumer");
  std::vector<Rank> shared = two;
  std::vector<Rank> alone = one;
  for (Rank& rank : shared)
    rank[0].replicated = true;
  alone[0][0].replicated = true;
  EXPECT_TRUE(assign_writers(shared, alone).is_ok());
  EXPECT_TRUE(assign_writers(alone, shared).is_ok());
}

}  // namespace
}  // namespace kvpush
