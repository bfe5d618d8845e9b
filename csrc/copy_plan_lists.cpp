#include "copy_plan_lists.h"

#include <algorithm>
#include <utility>

#include "check.h"

namespace kvpush {
namespace {

// More blocks than this in a run of the usual length, and telling the transport runs is quicker
// than telling it the index of each block (python -m bench desc_prep).
constexpr std::uint64_t kMaxBlocksPerRun = 4;
// A base with more blocks than this many times what lists may have does without.
constexpr std::uint64_t kMaxOversize = 2;

}  // namespace

ClassLists::ClassLists(const GeometryClass& geometry_class) {
  const PairGeometry& geometry = geometry_class.geometry();
  const std::uint64_t length = geometry_class.block.length;
  // A region of one block may have any stride, even none: an index would not tell its address.
  if (geometry.consumer.block_stride < length || geometry.producer.block_stride < length) return;
  bases_ = geometry_class.bases.size();
  blocks_ = std::max(geometry.consumer.num_blocks, geometry.producer.num_blocks);
}

// How many bases may share lists; 0: not even one can have any.
std::uint64_t ClassLists::bases_per_piece(const ListsRule& rule) const {
  if (blocks_ == 0 || blocks_ > rule.max_blocks * kMaxOversize) return 0;
  return std::min<std::uint64_t>(std::max<std::uint64_t>(rule.max_blocks / blocks_, 1), bases_);
}

bool ClassLists::are_of_use(const ListsRule& rule, std::uint64_t runs, std::uint64_t blocks) const {
  const std::uint64_t bases = bases_per_piece(rule);
  return bases != 0 && blocks <= runs * kMaxBlocksPerRun && runs * bases >= rule.min_descriptors;
}

void ClassLists::want(const ListsRule& rule) {
  if (!pieces_.empty()) return;
  const auto bases = static_cast<std::uint32_t>(bases_);
  const auto step = static_cast<std::uint32_t>(bases_per_piece(rule));
  KVPUSH_CHECK(step != 0, "lists that can be had");
  for (std::uint32_t begin = 0; begin < bases; begin += step)
    pieces_.push_back({begin, std::min(begin + step, bases), 0});
}

bool ClassLists::has_any() const {
  return std::ranges::any_of(pieces_, [](const ListsPiece& piece) { return piece.lists != 0; });
}

const ListsPiece* ClassLists::untried() const {
  return tried_ == pieces_.size() ? nullptr : &pieces_[tried_];
}

void ClassLists::set_tried(ListsId lists) {
  KVPUSH_CHECK(tried_ != pieces_.size(), "lists of a grid that was asked for");
  pieces_[tried_].lists = lists;
  tried_ = lists == 0 ? pieces_.size() : tried_ + 1;
}

BlockGrid grid_of(const GeometryClass& geometry_class, const ListsPiece& piece,
                  bool local_is_producer) {
  const PairGeometry& geometry = geometry_class.geometry();
  BlockGrid grid;
  grid.block_bytes = geometry_class.block.length;
  grid.local = {geometry.producer_memory,
                geometry.producer_device,
                geometry.producer.block_stride,
                geometry.producer.num_blocks,
                {}};
  grid.remote = {geometry.consumer_memory,
                 geometry.consumer_device,
                 geometry.consumer.block_stride,
                 geometry.consumer.num_blocks,
                 {}};
  for (std::uint32_t i = piece.bases_begin; i < piece.bases_end; ++i) {
    grid.local.bases.push_back(geometry_class.bases[i].producer);
    grid.remote.bases.push_back(geometry_class.bases[i].consumer);
  }
  if (!local_is_producer) std::swap(grid.local, grid.remote);
  return grid;
}

}  // namespace kvpush
