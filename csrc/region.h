// Region: one layer's KV memory on one rank, described by real addresses and strides.
//
// Everything the planner knows of a layout is here; nothing is guessed from a shape or a name.
// The address of a byte of an attention region is
//   base + block * block_stride + (t / tokens_per_page) * page_stride
//        + (t % tokens_per_page) * token_stride + component * component_stride
//        + (head - first_head) * head_stride + byte,
// with t the token's place in its block, head a global index, byte in [0, element_bytes).
// Strides are bytes and may be larger than what they step over (padding, packed tensors, K and V
// in two halves of one allocation). Plain value: any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory.h"
#include "status.h"
#include "types.h"

namespace kvpush {

enum class RegionKind : std::uint8_t {
  kAttention = 0,  // KV addressed by token position and head (dense, sliding window, MLA)
  kState = 1,      // opaque per-block state, copied whole
};

struct Region {
  // The layer's global name, the same on every rank and on both sides: what regions are matched by.
  // A layer with several tensors has one region for each, told apart by a suffix.
  std::string layer;
  RegionKind kind = RegionKind::kAttention;
  std::uint32_t group = 0;  // the owning engine's KV cache group: index into its BlockTable
  std::string dtype;        // element type as vLLM names it; must be equal on both sides

  MemoryKind memory = MemoryKind::kHost;
  std::uint32_t device = 0;

  std::uint64_t base = 0;          // address of block 0
  std::uint64_t block_stride = 0;  // bytes between the starts of neighbouring blocks
  std::uint32_t num_blocks = 0;

  // Attention only. tokens_per_block = pages * tokens_per_page, in units of the scheduler's block.
  std::uint32_t tokens_per_block = 0;
  std::uint32_t tokens_per_page = 0;  // kernel block; equal to tokens_per_block where not split
  std::uint64_t page_stride = 0;
  std::uint64_t token_stride = 0;
  std::uint32_t components = 1;  // 2: K and V apart; 1: packed content or a latent
  std::uint64_t component_stride = 0;
  std::uint32_t first_head = 0;   // global index of the first head held here
  std::uint32_t heads = 0;        // heads held here
  std::uint32_t total_heads = 0;  // heads of the layer over all ranks; both sides must agree
  std::uint64_t head_stride = 0;
  std::uint64_t element_bytes = 0;  // contiguous bytes of one (component, head, token)
  bool replicated = false;          // every rank holds all of it (MLA latent): any may send it

  // State only: bytes copied per block.
  std::uint64_t state_bytes = 0;

  bool operator==(const Region&) const = default;
};

// Checks one region in itself: extents nonzero, no overflow, strides that don't overlap. The error
// names the layer, the field and the value. `index` is its place in the list, for the message.
Status validate_region(const Region& region, std::size_t index);

// The most regions one rank may declare: 4 tensors for each of 1,024 layers.
constexpr std::size_t kMaxRegions = 4'096;
// Tokens in one block. Blocks of hybrid models reach some thousands, so this is room 64 times over;
// what the planner keeps for each geometry grows with it.
constexpr std::uint32_t kMaxTokensPerBlock = 262'144;
// K and V are two; a cache that keeps its keys transposed has one for each of a head's elements, of
// which models have up to 576.
constexpr std::uint32_t kMaxComponents = 1'024;
// KV heads of one layer over all ranks. Models have up to some hundred.
constexpr std::uint32_t kMaxHeads = 65'536;

}  // namespace kvpush
