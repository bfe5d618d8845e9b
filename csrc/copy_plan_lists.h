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
  // One whose whole blocks are each one piece of memory on both sides.
  explicit ClassLists(const GeometryClass& geometry_class);

  // Whether lists are a quicker way than runs to tell the transport of `runs` runs, which have
  // `blocks` blocks in all, at each base.
  bool are_of_use(const ListsRule& rule, std::uint64_t runs, std::uint64_t blocks) const;
  // They would have been of use: cuts the bases into pieces, if that has not been done.
  void want(const ListsRule& rule);

  std::span<const ListsPiece> pieces() const noexcept { return pieces_; }
  bool has_any() const;
  // The next piece that nobody has tried to prepare; null: none.
  const ListsPiece* untried() const;
  // What came of untried(); 0: it can't be had, nor can those after it.
  void set_tried(ListsId lists);

 private:
  std::uint64_t bases_per_piece(const ListsRule& rule) const;

  std::uint64_t bases_ = 0;
  std::uint64_t blocks_ = 0;  // at each base, on the side that has more
  std::vector<ListsPiece> pieces_;
  std::size_t tried_ = 0;
};

// The blocks at the bases of a piece.
BlockGrid grid_of(const GeometryClass& geometry_class, const ListsPiece& piece,
                  bool local_is_producer);

}  // namespace kvpush
