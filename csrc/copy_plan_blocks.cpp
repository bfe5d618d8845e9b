#include "copy_plan_blocks.h"

#include <algorithm>
#include <string>

namespace kvpush {
namespace {

// One more than the largest id. Signed where that does: SSE2 compares no unsigned numbers.
std::uint64_t blocks_named(const GroupBlocks& blocks) {
  std::int32_t most = 0;
  std::uint32_t all = 0;
  for (const BlockId id : blocks.ids) {
    const std::uint32_t named = id + 1U;  // a hole wraps to 0
    most = std::max(most, static_cast<std::int32_t>(named));
    all |= named;
  }
  if (static_cast<std::int32_t>(all) >= 0) return static_cast<std::uint64_t>(most);
  std::uint32_t largest = 0;
  for (const BlockId id : blocks.ids)
    largest = std::max(largest, id + 1U);
  return largest;
}

std::uint32_t narrow(std::uint64_t tokens) {
  return static_cast<std::uint32_t>(tokens);
}

}  // namespace

void BlockMatcher::clear() {
  overlap_count_ = 0;
  consumer_named_ = producer_named_ = 0;
}

Status BlockMatcher::look(const BlockTable& consumer, const BlockTable& producer) {
  if (key_.consumer_group >= consumer.size() || key_.producer_group >= producer.size()) {
    const bool theirs = key_.consumer_group >= consumer.size();
    return Status::error(
        std::string("block table of the ") + (theirs ? "consumer" : "producer") + " has " +
        std::to_string(theirs ? consumer.size() : producer.size()) + " groups, group " +
        std::to_string(theirs ? key_.consumer_group : key_.producer_group) + " is needed");
  }
  consumer_named_ = blocks_named(consumer[key_.consumer_group]);
  producer_named_ = blocks_named(producer[key_.producer_group]);
  return Status::ok();
}

Status BlockMatcher::match(TokenSpan span, const BlockTable& consumer, const BlockTable& producer) {
  const GroupBlocks& to = consumer[key_.consumer_group];
  const GroupBlocks& from = producer[key_.producer_group];
  Result<Range> range = needed(span, to);
  if (!range.is_ok()) return range.status();
  if (range.value().begin >= range.value().end) return Status::ok();
  return key_.consumer_tokens_per_block == key_.producer_tokens_per_block
             ? match_equal(range.value(), to, from)
             : match_unequal(range.value(), to, from);
}

Result<BlockMatcher::Range> BlockMatcher::needed(TokenSpan span,
                                                 const GroupBlocks& consumer) const {
  const std::uint64_t per_block = key_.consumer_tokens_per_block;
  const Range listed{consumer.first_block * per_block,
                     (consumer.first_block + std::uint64_t{consumer.ids.size()}) * per_block};
  if (key_.state) return listed;
  if (span.empty()) return Range{};
  if (listed.end < span.end) {
    return Status::error("group " + std::to_string(key_.consumer_group) +
                         ": the consumer's blocks end at token " + std::to_string(listed.end) +
                         ", before the span's end " + std::to_string(span.end));
  }
  return Range{std::max<std::uint64_t>(span.begin, listed.begin), span.end};
}

BlockMatcher::Sorted BlockMatcher::sort_needed(Range range, const GroupBlocks& consumer) {
  const std::uint64_t per_block = key_.consumer_tokens_per_block;
  const std::uint64_t first = range.begin / per_block;
  const std::uint64_t end = (range.end - 1) / per_block + 1;
  const std::span<const BlockId> ids{consumer.ids};
  const std::span<const BlockId> listed = ids.subspan(first - consumer.first_block, end - first);
  return {order_.sort(listed, static_cast<BlockId>(consumer_named_ - 1)), first};
}

Status BlockMatcher::match_equal(Range range, const GroupBlocks& consumer,
                                 const GroupBlocks& producer) {
  const std::uint64_t per_block = key_.consumer_tokens_per_block;
  // Only the first and the last block of a range can be needed in part.
  const std::uint64_t first_whole = (range.begin + per_block - 1) / per_block;
  const std::uint64_t end_whole = range.end / per_block;
  const Sorted needed = sort_needed(range, consumer);
  if (overlaps_.size() < needed.blocks.size()) overlaps_.resize(needed.blocks.size());
  Overlap* out = overlaps_.data();
  for (const PlacedBlock& block : needed.blocks) {
    const std::uint64_t index = needed.first_index + block.place;
    const std::uint64_t place = index - producer.first_block;  // wraps where it is missing
    if (place >= producer.ids.size() || producer.ids[place] == kNoBlock) {
      return missing(index, index);
    }
    *out = {block.id, producer.ids[place], 0, 0, narrow(per_block)};
    if (index < first_whole || index >= end_whole) {
      const std::uint64_t begin = std::max(index * per_block, range.begin);
      const std::uint64_t end = std::min((index + 1) * per_block, range.end);
      out->consumer_token = out->producer_token = narrow(begin - index * per_block);
      out->tokens = narrow(end - begin);
    }
    ++out;
  }
  overlap_count_ = needed.blocks.size();
  return Status::ok();
}

Status BlockMatcher::match_unequal(Range range, const GroupBlocks& consumer,
                                   const GroupBlocks& producer) {
  const std::uint64_t to_size = key_.consumer_tokens_per_block;
  const std::uint64_t from_size = key_.producer_tokens_per_block;
  const Sorted needed = sort_needed(range, consumer);
  overlaps_.clear();
  for (const PlacedBlock& block : needed.blocks) {
    const std::uint64_t index = needed.first_index + block.place;
    const std::uint64_t block_end = std::min((index + 1) * to_size, range.end);
    std::uint64_t token = std::max(index * to_size, range.begin);
    for (std::uint64_t from = token / from_size; token < block_end; ++from) {
      const std::uint64_t place = from - producer.first_block;
      if (place >= producer.ids.size() || producer.ids[place] == kNoBlock) {
        return missing(from, index);
      }
      const std::uint64_t end = std::min((from + 1) * from_size, block_end);
      overlaps_.push_back({block.id, producer.ids[place], narrow(token - index * to_size),
                           narrow(token - from * from_size), narrow(end - token)});
      token = end;
    }
  }
  overlap_count_ = overlaps_.size();
  return Status::ok();
}

Status BlockMatcher::missing(std::uint64_t producer_index, std::uint64_t consumer_index) const {
  return Status::error("group " + std::to_string(key_.producer_group) +
                       ": the producer has no block " + std::to_string(producer_index) +
                       " of the request, which the consumer's block " +
                       std::to_string(consumer_index) + " (group " +
                       std::to_string(key_.consumer_group) + ") needs");
}

}  // namespace kvpush
