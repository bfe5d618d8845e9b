#include "copy_plan_blocks.h"

#include <algorithm>
#include <array>
#include <string>

namespace kvpush {
namespace {

// Below this many blocks the standard sort beats the counting passes (both took about 6 us at it).
constexpr std::size_t kRadixFrom = 256;
// Two passes sort 262,144 block ids, which most pools have no more of; clearing and adding up more
// counters than that is dearer than a third pass for lists of some thousand.
constexpr unsigned kRadixBits = 9;
constexpr std::size_t kRadixBuckets = std::size_t{1} << kRadixBits;
constexpr unsigned kIdShift = 32;

std::uint64_t blocks_named(const GroupBlocks& blocks) {
  BlockId most = 0;
  for (const BlockId id : blocks.ids) {
    most = std::max(most, id + 1U);  // a hole wraps to 0
  }
  return most;
}

std::uint32_t list_place(std::uint64_t entry) {
  return static_cast<std::uint32_t>(entry);
}
BlockId block_id(std::uint64_t entry) {
  return static_cast<BlockId>(entry >> kIdShift);
}

std::uint32_t narrow(std::uint64_t tokens) {
  return static_cast<std::uint32_t>(tokens);
}

}  // namespace

Status BlockMatcher::match(TokenSpan span, const BlockTable& consumer, const BlockTable& producer) {
  overlaps_.clear();
  consumer_named_ = producer_named_ = 0;
  if (key_.consumer_group >= consumer.size() || key_.producer_group >= producer.size()) {
    const bool theirs = key_.consumer_group >= consumer.size();
    return Status::error(
        std::string("block table of the ") + (theirs ? "consumer" : "producer") + " has " +
        std::to_string(theirs ? consumer.size() : producer.size()) + " groups, group " +
        std::to_string(theirs ? key_.consumer_group : key_.producer_group) + " is needed");
  }
  const GroupBlocks& to = consumer[key_.consumer_group];
  const GroupBlocks& from = producer[key_.producer_group];
  consumer_named_ = blocks_named(to);
  producer_named_ = blocks_named(from);
  Result<Range> range = needed(span, to);
  if (!range.is_ok()) return range.status();
  if (range.value().begin >= range.value().end) return Status::ok();
  sort_consumer_blocks(range.value(), to);
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

void BlockMatcher::sort_consumer_blocks(Range range, const GroupBlocks& consumer) {
  const std::uint64_t per_block = key_.consumer_tokens_per_block;
  const std::uint64_t first = range.begin / per_block - consumer.first_block;
  const std::uint64_t last = (range.end - 1) / per_block - consumer.first_block;
  order_.clear();
  bool rises = true;
  BlockId previous = 0;
  BlockId largest = 0;
  for (std::uint64_t place = first; place <= last; ++place) {
    const BlockId id = consumer.ids[place];
    if (id == kNoBlock) continue;
    rises = rises && id >= previous;
    previous = id;
    largest = std::max(largest, id);
    order_.push_back(std::uint64_t{id} << kIdShift | place);
  }
  if (rises) return;
  if (order_.size() < kRadixFrom) {
    std::sort(order_.begin(), order_.end());
  } else {
    radix_sort(largest);
  }
}

void BlockMatcher::radix_sort(BlockId largest) {
  spare_.resize(order_.size());
  for (unsigned shift = kIdShift; shift == kIdShift || largest >> (shift - kIdShift) != 0;
       shift += kRadixBits) {
    std::array<std::uint32_t, kRadixBuckets> starts{};
    for (const std::uint64_t entry : order_)
      ++starts[entry >> shift & (kRadixBuckets - 1)];
    std::uint32_t start = 0;
    for (std::uint32_t& slot : starts) {
      const std::uint32_t count = slot;
      slot = start;
      start += count;
    }
    for (const std::uint64_t entry : order_) {
      spare_[starts[entry >> shift & (kRadixBuckets - 1)]++] = entry;
    }
    order_.swap(spare_);
    if (shift + kRadixBits >= 2 * kIdShift) break;
  }
}

Status BlockMatcher::match_equal(Range range, const GroupBlocks& consumer,
                                 const GroupBlocks& producer) {
  const std::uint64_t per_block = key_.consumer_tokens_per_block;
  // Only the first and the last block of a range can be needed in part.
  const std::uint64_t first_whole = (range.begin + per_block - 1) / per_block;
  const std::uint64_t end_whole = range.end / per_block;
  for (const std::uint64_t entry : order_) {
    const std::uint64_t index = consumer.first_block + std::uint64_t{list_place(entry)};
    const std::uint64_t place = index - producer.first_block;  // wraps where it is missing
    if (place >= producer.ids.size() || producer.ids[place] == kNoBlock) {
      overlaps_.clear();
      return missing(index, index);
    }
    if (index >= first_whole && index < end_whole) {
      overlaps_.push_back({block_id(entry), producer.ids[place], 0, 0, narrow(per_block)});
      continue;
    }
    const std::uint64_t begin = std::max(index * per_block, range.begin);
    const std::uint64_t end = std::min((index + 1) * per_block, range.end);
    const std::uint32_t token = narrow(begin - index * per_block);
    overlaps_.push_back({block_id(entry), producer.ids[place], token, token, narrow(end - begin)});
  }
  return Status::ok();
}

Status BlockMatcher::match_unequal(Range range, const GroupBlocks& consumer,
                                   const GroupBlocks& producer) {
  const std::uint64_t to_size = key_.consumer_tokens_per_block;
  const std::uint64_t from_size = key_.producer_tokens_per_block;
  for (const std::uint64_t entry : order_) {
    const std::uint64_t index = consumer.first_block + std::uint64_t{list_place(entry)};
    const std::uint64_t block_end = std::min((index + 1) * to_size, range.end);
    std::uint64_t token = std::max(index * to_size, range.begin);
    for (std::uint64_t from = token / from_size; token < block_end; ++from) {
      const std::uint64_t place = from - producer.first_block;
      if (place >= producer.ids.size() || producer.ids[place] == kNoBlock) {
        overlaps_.clear();
        return missing(from, index);
      }
      const std::uint64_t end = std::min((from + 1) * from_size, block_end);
      overlaps_.push_back({block_id(entry), producer.ids[place], narrow(token - index * to_size),
                           narrow(token - from * from_size), narrow(end - token)});
      token = end;
    }
  }
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
