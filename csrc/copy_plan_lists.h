// Prepared lists of one class of geometries: when they are of use, in which pieces they come, and
// which of those the transport has.
// Plain bookkeeping. Thread: the planner's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy_plan.h"
#include "copy_plan_geometry.h"
#include "memory.h"

namespace kvpush {

// Some bases of a class, and the transport's lists of all their blocks; 0: there are none (yet).
struct ListsPiece {
  std::uint32_t bases_begin = 0;
  std::uint32_t bases_end = 0;
  ListsId lists = 0;
};

class ClassLists {
 public:
  // A class without lists, whatever is planned.
  ClassLists() = default;
  // A class may have lists where a whole block is one piece of memory on both sides, or several at
  // the distance of the whole pool (all keys before all values): then the pools of one base count
  // as one with that many times the blocks. It must have a block shape.
  explicit ClassLists(const GeometryClass& geometry_class);

  std::uint32_t consumer_blocks() const noexcept { return consumer_blocks_; }
  std::uint32_t producer_blocks() const noexcept { return producer_blocks_; }

  // Whether lists are a quicker way than runs to tell the transport of `runs` runs at each base, of
  // `blocks` blocks of the request.
  bool are_of_use(const ListsRule& rule, std::uint64_t runs, std::uint64_t blocks) const;
  // They would have been of use: cuts the bases into pieces, if that has not been done.
  void want(const ListsRule& rule);

  std::span<const ListsPiece> pieces() const noexcept { return pieces_; }
  bool has_any() const;
  // The next piece that nobody has tried to prepare; null: none.
  const ListsPiece* untried() const;
  // What came of untried(); 0: it can't be had, nor can those after it.
  void set_tried(ListsId lists);

  // The blocks at the bases of a piece.
  BlockGrid grid_of(const GeometryClass& geometry_class, const ListsPiece& piece,
                    bool local_is_producer) const;

 private:
  std::uint64_t bases_per_piece(const ListsRule& rule) const;

  std::uint64_t bases_ = 0;
  std::uint32_t consumer_blocks_ = 0;  // at each base; 0: no lists
  std::uint32_t producer_blocks_ = 0;
  std::uint64_t pieces_of_block_ = 1;
  std::vector<ListsPiece> pieces_;
  std::size_t tried_ = 0;
};

}  // namespace kvpush
