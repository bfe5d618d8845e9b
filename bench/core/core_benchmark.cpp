// google-benchmark of the core: planning, messages, coverage. `python -m bench core` runs it and
// says where the recorded block ids are. Names end in regions/blocks/ids. Counters: `runs` as
// spelled out, `allocations` of one call. Planning must allocate nothing in its steady state, else
// the program fails.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "copy_plan_parts.h"
#include "coverage.h"
#include "message.h"
#include "support/allocations.h"
#include "workload.h"

namespace kvpush::bench {
namespace {

enum class Pattern { kContiguous, kRecorded, kRandom };
const std::map<Pattern, std::string> kPatterns = {{Pattern::kContiguous, "contiguous"},
                                                  {Pattern::kRecorded, "recorded"},
                                                  {Pattern::kRandom, "random"}};
constexpr std::uint32_t kSizes[] = {64, 1'024, 8'192};
constexpr std::uint64_t kProducerBase = std::uint64_t{1} << 40;
constexpr std::uint64_t kConsumerBase = std::uint64_t{1} << 44;

bool failed = false;

// By number of blocks: what vLLM's block manager gave out.
std::map<std::uint32_t, BlockLists> recorded;

// Lines of: n, n producer ids, n consumer ids.
bool load_recorded(const char* path) {
  std::ifstream in(path);
  std::uint32_t count = 0;
  while (in >> count) {
    std::vector<BlockId> sides[2] = {std::vector<BlockId>(count), std::vector<BlockId>(count)};
    for (std::vector<BlockId>& ids : sides) {
      for (BlockId& id : ids)
        in >> id;
    }
    if (!in) return false;
    recorded[count] = make_lists(std::move(sides[0]), std::move(sides[1]));
  }
  return std::ranges::all_of(kSizes, [](std::uint32_t size) { return recorded.contains(size); });
}

BlockLists lists_of(Pattern pattern, std::uint32_t blocks) {
  if (pattern == Pattern::kRecorded) return recorded.at(blocks);
  std::vector<BlockId> producer(kPoolBlocks);
  std::iota(producer.begin(), producer.end(), 0U);
  std::vector<BlockId> consumer = producer;
  if (pattern == Pattern::kRandom) {
    std::mt19937 random(blocks);  // NOLINT: the same in each run
    std::ranges::shuffle(producer, random);
    std::ranges::shuffle(consumer, random);
  }
  producer.resize(blocks);
  consumer.resize(blocks);
  return make_lists(std::move(producer), std::move(consumer));
}

void fail(benchmark::State& state, const char* why) {
  failed = true;
  state.SkipWithError(why);
}

// ---- planning --------------------------------------------------------------------------------

void plan_pattern(benchmark::State& state, std::uint32_t regions, const BlockLists& lists) {
  CopyPlanner planner = make_planner(regions, kProducerBase, kConsumerBase);
  PatternPlan plan;
  const auto once = [&] {
    return planner.plan_pattern(lists.span(), lists.producer, lists.consumer, plan).is_ok();
  };
  if (!once()) return fail(state, "the plan failed");
  const std::uint64_t before = allocations;
  if (!once() || allocations != before) return fail(state, "a steady state allocates");
  for (auto _ : state)
    benchmark::DoNotOptimize(once());
  state.counters["runs"] = static_cast<double>(plan.total_runs);
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(plan.descriptors_before));
}

// Cutting a plan into parts and spelling out each, as the engine does before it posts.
void spell_out(benchmark::State& state, std::uint32_t regions, const BlockLists& lists) {
  CopyPlanner planner = make_planner(regions, kProducerBase, kConsumerBase);
  PatternPlan plan;
  if (!planner.plan_pattern(lists.span(), lists.producer, lists.consumer, plan).is_ok()) {
    return fail(state, "the plan failed");
  }
  const auto total = static_cast<std::int64_t>(plan.total_runs);
  PlanParts parts;
  std::vector<CopyRun> runs;
  for (auto _ : state) {
    parts.assign(std::move(plan), {1'024, 32U << 20});
    for (std::size_t part = 0; part < parts.size(); ++part)
      benchmark::DoNotOptimize(parts.spell_out(part, runs).runs.data());
    plan = parts.take();
  }
  state.SetItemsProcessed(state.iterations() * total);
}

// ---- messages --------------------------------------------------------------------------------

Message grant_of(const BlockLists& lists) {
  GrantMessage grant;
  grant.attempt = 1;
  grant.key.transfer_id = "cmpl-0123456789abcdef0123456789abcdef";
  grant.span = lists.span();
  grant.blocks = lists.consumer;
  return {1, std::move(grant)};
}

void encode_grant(benchmark::State& state, const BlockLists& lists) {
  const Message message = grant_of(lists);
  for (auto _ : state)
    benchmark::DoNotOptimize(encode_message(message));
  state.counters["bytes"] = static_cast<double>(encode_message(message).size());
  const std::uint64_t before = allocations;
  benchmark::DoNotOptimize(encode_message(message));
  state.counters["allocations"] = static_cast<double>(allocations - before);
}

void parse_grant(benchmark::State& state, const BlockLists& lists) {
  const Message message = grant_of(lists);
  const Bytes bytes = encode_message(message);
  const Result<Message> parsed = parse_message(bytes);
  if (!parsed.is_ok() || parsed.value() != message) return fail(state, "grants differ");
  for (auto _ : state)
    benchmark::DoNotOptimize(parse_message(bytes));
  const std::uint64_t before = allocations;
  benchmark::DoNotOptimize(parse_message(bytes));
  state.counters["allocations"] = static_cast<double>(allocations - before);
}

// ---- coverage --------------------------------------------------------------------------------

// A prompt written in steps of 256 tokens, each in some parts, in no order.
void cover(benchmark::State& state, std::uint32_t steps, std::uint32_t parts) {
  constexpr std::uint32_t kStepTokens = 256;
  std::vector<WrittenMessage> written;
  for (std::uint32_t step = 0; step < steps; ++step) {
    for (std::uint32_t part = 0; part < parts; ++part)
      written.push_back({1, {step * kStepTokens, (step + 1) * kStepTokens}, part, parts});
  }
  std::ranges::shuffle(written, std::mt19937(steps));  // NOLINT: the same in each run
  for (auto _ : state) {
    Coverage coverage;
    for (const WrittenMessage& message : written)
      benchmark::DoNotOptimize(coverage.add(message));
    if (!coverage.covers({0, steps * kStepTokens})) return fail(state, "not covered");
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(written.size()));
}

void register_all() {
  for (const std::uint32_t blocks : kSizes) {
    for (const auto& [pattern, pattern_name] : kPatterns) {
      const BlockLists lists = lists_of(pattern, blocks);
      const std::string ids = "/" + std::to_string(blocks) + "/" + pattern_name;
      for (const std::uint32_t regions : {64U, 128U}) {
        const std::string name = "/" + std::to_string(regions) + ids;
        benchmark::RegisterBenchmark(("plan_pattern" + name).c_str(),
                                     [=](auto& state) { plan_pattern(state, regions, lists); });
        benchmark::RegisterBenchmark(("spell_out" + name).c_str(),
                                     [=](auto& state) { spell_out(state, regions, lists); });
      }
      benchmark::RegisterBenchmark(("encode_grant" + ids).c_str(),
                                   [=](auto& state) { encode_grant(state, lists); });
      benchmark::RegisterBenchmark(("parse_grant" + ids).c_str(),
                                   [=](auto& state) { parse_grant(state, lists); });
    }
  }
  for (const auto& [steps, parts] : {std::pair{1U, 1U}, {1U, 512U}, {64U, 8U}, {512U, 1U}}) {
    benchmark::RegisterBenchmark(
        ("cover/" + std::to_string(steps) + "/" + std::to_string(parts)).c_str(),
        [=](auto& state) { cover(state, steps, parts); });
  }
}

}  // namespace
}  // namespace kvpush::bench

int main(int argc, char** argv) {
  const char* path = std::getenv("KVPUSH_BENCH_IDS");
  if (path == nullptr || !kvpush::bench::load_recorded(path)) {
    std::fprintf(stderr,
                 "KVPUSH_BENCH_IDS names no file of recorded block ids; run this as "
                 "`python -m bench core`\n");
    return 2;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  kvpush::bench::register_all();
  benchmark::RunSpecifiedBenchmarks();
  return kvpush::bench::failed ? 1 : 0;
}
