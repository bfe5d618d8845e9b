// Which block goes to which block: the part of a copy plan that depends on block ids alone.
// Made once in a plan for each pair of groups and replayed for every layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "copy_plan_order.h"
#include "status.h"
#include "types.h"

namespace kvpush {

// `tokens` tokens that lie in one block of each side, from these places within the blocks.
struct Overlap {
  BlockId consumer_block = 0;
  BlockId producer_block = 0;
  std::uint32_t consumer_token = 0;
  std::uint32_t producer_token = 0;
  std::uint32_t tokens = 0;
};

// What the list is made for. A state counts blocks as its tokens.
struct GroupPairKey {
  std::uint32_t consumer_group = 0;
  std::uint32_t producer_group = 0;
  std::uint32_t consumer_tokens_per_block = 1;
  std::uint32_t producer_tokens_per_block = 1;
  bool state = false;
  bool operator==(const GroupPairKey&) const = default;
};

// Scratch memory included, so that it is reused. Thread: any one at a time.
class BlockMatcher {
 public:
  explicit BlockMatcher(const GroupPairKey& key) : key_(key) {}

  // Notes which blocks the lists name. The ids of both must then be found to be in range.
  Status look(const BlockTable& consumer, const BlockTable& producer);
  // Of the lists that it has looked at. Fills overlaps(), in rising order of consumer block: of all
  // orders that one keeps together whatever can be merged, since what is adjacent on both sides is
  // adjacent on the consumer's.
  Status match(TokenSpan span, const BlockTable& consumer, const BlockTable& producer);
  void clear();

  const GroupPairKey& key() const noexcept { return key_; }
  std::span<const Overlap> overlaps() const noexcept { return {overlaps_.data(), overlap_count_}; }
  // One more than the largest id named, holes left out: what num_blocks must reach.
  std::uint64_t consumer_blocks_named() const noexcept { return consumer_named_; }
  std::uint64_t producer_blocks_named() const noexcept { return producer_named_; }

 private:
  // Tokens from `begin` to `end`, 64 bits wide: a block list may reach beyond any span.
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  struct Sorted {
    std::span<const PlacedBlock> blocks;  // of the consumer; places count from
    std::uint64_t first_index = 0;        // this block of the request
  };
  Result<Range> needed(TokenSpan span, const GroupBlocks& consumer) const;
  Sorted sort_needed(Range range, const GroupBlocks& consumer);
  Status match_equal(Range range, const GroupBlocks& consumer, const GroupBlocks& producer);
  Status match_unequal(Range range, const GroupBlocks& consumer, const GroupBlocks& producer);
  Status missing(std::uint64_t producer_index, std::uint64_t consumer_index) const;

  GroupPairKey key_;
  BlockOrder order_;
  std::vector<Overlap> overlaps_;  // the first overlap_count_ are the result; only grows
  std::size_t overlap_count_ = 0;
  std::uint64_t consumer_named_ = 0;
  std::uint64_t producer_named_ = 0;
};

}  // namespace kvpush
