// Small attention regions for tests of what lies above the planner.
#pragma once

#include <string>
#include <vector>

#include "region.h"

namespace kvpush {

constexpr std::uint32_t kTinyTokensPerBlock = 4;
constexpr std::uint64_t kTinyElementBytes = 8;

// Bytes of one block of a region with `heads` heads: [head][token][element].
constexpr std::uint64_t tiny_block_bytes(std::uint32_t heads) {
  return std::uint64_t{heads} * kTinyTokensPerBlock * kTinyElementBytes;
}

// Two layers, one after the other from `base`, holding heads [first, first + heads) of `total`.
inline std::vector<Region> tiny_regions(std::uint64_t base, std::uint32_t blocks,
                                        std::uint32_t first, std::uint32_t heads,
                                        std::uint32_t total) {
  std::vector<Region> regions;
  for (int layer = 0; layer < 2; ++layer) {
    Region region;
    region.layer = "layer" + std::to_string(layer);
    region.dtype = "float32";
    region.base = base + static_cast<std::uint64_t>(layer) * blocks * tiny_block_bytes(heads);
    region.block_stride = tiny_block_bytes(heads);
    region.num_blocks = blocks;
    region.tokens_per_block = kTinyTokensPerBlock;
    region.tokens_per_page = kTinyTokensPerBlock;
    region.page_stride = region.block_stride;
    region.token_stride = kTinyElementBytes;
    region.component_stride = region.block_stride;
    region.first_head = first;
    region.heads = heads;
    region.total_heads = total;
    region.head_stride = kTinyTokensPerBlock * kTinyElementBytes;
    region.element_bytes = kTinyElementBytes;
    regions.push_back(region);
  }
  return regions;
}

}  // namespace kvpush
