// Blocks of one list in rising order of their ids. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "types.h"

namespace kvpush {

struct PlacedBlock {
  BlockId id = 0;
  std::uint32_t place = 0;  // index in the list
};

// Scratch memory included, so that it is reused. Thread: any one at a time.
class BlockOrder {
 public:
  // The blocks of `ids` that are not holes, by rising id; an id named more than once comes as often
  // as it is named, by rising place. `ids` names no id beyond `largest`. The result holds until the
  // next call.
  std::span<const PlacedBlock> sort(std::span<const BlockId> ids, BlockId largest);

 private:
  bool take_rising(std::span<const BlockId> ids);
  bool mark(std::span<const BlockId> ids, BlockId largest);
  void collect_marked();
  void take_any(std::span<const BlockId> ids);
  void sort_by_digits(BlockId largest);

  std::vector<PlacedBlock> blocks_;  // the first size_ are the result; only grows
  std::size_t size_ = 0;
  std::vector<PlacedBlock> spare_;
  std::vector<std::uint64_t> marked_;  // a bit for each id
  std::vector<std::uint32_t> places_;  // of the marked ids
};

}  // namespace kvpush
