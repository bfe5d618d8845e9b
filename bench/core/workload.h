// What the C++ benchmarks work on: two ranks with equal layouts, as bench/desc_prep.py makes them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "copy_plan.h"
#include "region.h"
#include "types.h"

namespace kvpush::bench {

constexpr std::uint64_t kBlockBytes = 64;  // small: the work for each descriptor is what counts
constexpr std::uint32_t kPoolBlocks = 20'000;
constexpr std::uint32_t kBlockTokens = 16;

inline std::vector<Region> make_rank(std::uint32_t regions, std::uint64_t base) {
  std::vector<Region> rank;
  for (std::uint32_t i = 0; i < regions; ++i) {
    Region region;
    region.layer = "layer." + std::to_string(i);
    region.dtype = "bfloat16";
    region.base = base + i * kPoolBlocks * kBlockBytes;
    region.block_stride = kBlockBytes;
    region.num_blocks = kPoolBlocks;
    region.tokens_per_block = region.tokens_per_page = kBlockTokens;
    region.page_stride = kBlockBytes;
    region.token_stride = kBlockBytes / kBlockTokens;
    region.heads = region.total_heads = 1;
    region.element_bytes = kBlockBytes / kBlockTokens;
    rank.push_back(std::move(region));
  }
  return rank;
}

// The producer's planner, of one rank towards one rank.
inline CopyPlanner make_planner(std::uint32_t regions, std::uint64_t producer,
                                std::uint64_t consumer) {
  const std::vector<Region> local = make_rank(regions, producer);
  const std::vector<Region> remote = make_rank(regions, consumer);
  const Result<Assignment> assigned = assign_writers({&local, 1}, {&remote, 1});
  KVPUSH_CHECK(assigned.is_ok(), "equal layouts fit");
  return {local, remote, assigned.value().pairs(0, 0), true};
}

// One request's blocks on either side.
struct BlockLists {
  BlockTable producer;
  BlockTable consumer;
  TokenSpan span() const {
    return {0, static_cast<std::uint32_t>(producer.front().ids.size()) * kBlockTokens};
  }
};

inline BlockLists make_lists(std::vector<BlockId> producer, std::vector<BlockId> consumer) {
  return {{{0, std::move(producer)}}, {{0, std::move(consumer)}}};
}

}  // namespace kvpush::bench
