#include "copy_plan_order.h"

#include <algorithm>
#include <array>
#include <bit>

namespace kvpush {
namespace {

constexpr std::size_t kWordBits = 64;
// Marking ids in a table as long as the pool is the quickest where the list names one in this many
// of them or more; where it names fewer, going through the table takes longer than sorting.
constexpr std::size_t kMostIdsPerBlock = 128;
// Below this many blocks the standard sort beats the counting passes (both took about 6 us at it).
constexpr std::size_t kDigitsFrom = 256;
// Two passes sort 262,144 block ids, which most pools have no more of; clearing and adding up more
// counters than that is dearer than a third pass for lists of some thousand.
constexpr unsigned kDigitBits = 9;
constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;
constexpr unsigned kIdBits = 32;

}  // namespace

std::span<const PlacedBlock> BlockOrder::sort(std::span<const BlockId> ids, BlockId largest) {
  if (!take_rising(ids)) {
    if (largest / kMostIdsPerBlock <= ids.size() && mark(ids, largest)) {
      collect_marked();
    } else {
      take_any(ids);
      sort_by_digits(largest);
    }
  }
  return {blocks_.data(), size_};
}

// False where they do not rise.
bool BlockOrder::take_rising(std::span<const BlockId> ids) {
  if (blocks_.size() < ids.size()) blocks_.resize(ids.size());
  PlacedBlock* const out = blocks_.data();
  std::size_t count = 0;
  BlockId previous = 0;
  for (std::size_t place = 0; place < ids.size(); ++place) {
    const BlockId id = ids[place];
    if (id == kNoBlock) continue;
    if (id < previous) return false;
    previous = id;
    out[count++] = {id, static_cast<std::uint32_t>(place)};
  }
  size_ = count;
  return true;
}

// False where an id is named twice.
bool BlockOrder::mark(std::span<const BlockId> ids, BlockId largest) {
  marked_.assign(largest / kWordBits + 1, 0);
  if (places_.size() <= largest) places_.resize(std::size_t{largest} + 1);
  std::uint64_t twice = 0;
  for (std::size_t place = 0; place < ids.size(); ++place) {
    const BlockId id = ids[place];
    if (id == kNoBlock) continue;
    std::uint64_t& word = marked_[id / kWordBits];
    const std::uint64_t bit = std::uint64_t{1} << id % kWordBits;
    twice |= word & bit;
    word |= bit;
    places_[id] = static_cast<std::uint32_t>(place);
  }
  return twice == 0;
}

void BlockOrder::collect_marked() {
  PlacedBlock* out = blocks_.data();
  for (std::size_t word = 0; word < marked_.size(); ++word) {
    const auto first = static_cast<BlockId>(word * kWordBits);
    for (std::uint64_t bits = marked_[word]; bits != 0; bits &= bits - 1) {
      const BlockId id = first + static_cast<BlockId>(std::countr_zero(bits));
      *out++ = {id, places_[id]};
    }
  }
  size_ = static_cast<std::size_t>(out - blocks_.data());
}

void BlockOrder::take_any(std::span<const BlockId> ids) {
  size_ = 0;
  for (std::size_t place = 0; place < ids.size(); ++place) {
    if (ids[place] != kNoBlock) blocks_[size_++] = {ids[place], static_cast<std::uint32_t>(place)};
  }
}

void BlockOrder::sort_by_digits(BlockId largest) {
  if (size_ < kDigitsFrom) {
    const auto end = blocks_.begin() + static_cast<std::ptrdiff_t>(size_);
    std::sort(blocks_.begin(), end, [](const PlacedBlock& a, const PlacedBlock& b) {
      return a.id != b.id ? a.id < b.id : a.place < b.place;
    });
    return;
  }
  spare_.resize(blocks_.size());
  for (unsigned shift = 0; shift < kIdBits && largest >> shift != 0; shift += kDigitBits) {
    std::array<std::uint32_t, kDigits> starts{};
    for (std::size_t i = 0; i < size_; ++i)
      ++starts[blocks_[i].id >> shift & (kDigits - 1)];
    std::uint32_t start = 0;
    for (std::uint32_t& slot : starts) {
      const std::uint32_t count = slot;
      slot = start;
      start += count;
    }
    for (std::size_t i = 0; i < size_; ++i)
      spare_[starts[blocks_[i].id >> shift & (kDigits - 1)]++] = blocks_[i];
    blocks_.swap(spare_);
  }
}

}  // namespace kvpush
