#include "copy_plan_lists.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "check.h"

namespace kvpush {
namespace {

// More blocks than this in a run of the usual length, and telling the transport runs is quicker
// than telling it the index of each block (python -m bench desc_prep).
constexpr std::uint64_t kMaxBlocksPerRun = 4;
// A base with more blocks than this many times what lists may have does without.
constexpr std::uint64_t kMaxOversize = 2;

// How many blocks of `length` bytes one base of this side has in a row, all at its stride; 0: they
// are not.
std::uint32_t blocks_in_a_row(const SideGeometry& side, const Shape& block,
                              std::uint64_t axis_stride) {
  // A region of one block may have any stride, even none: an index would not tell its address.
  if (side.block_stride < block.length) return 0;
  if (block.axis_count == 0) return side.num_blocks;
  const std::uint64_t blocks = side.num_blocks * block.axes[0].extent;
  const bool dense = axis_stride == side.num_blocks * side.block_stride;
  return dense && blocks <= std::numeric_limits<std::uint32_t>::max()
             ? static_cast<std::uint32_t>(blocks)
             : 0;
}

}  // namespace

ClassLists::ClassLists(const GeometryClass& geometry_class) {
  const Shape& block = geometry_class.block;
  if (block.axis_count > 1) return;
  const PairGeometry& geometry = geometry_class.geometry();
  const Axis axis = block.axes[0];
  const std::uint32_t consumer = blocks_in_a_row(geometry.consumer, block, axis.consumer_stride);
  const std::uint32_t producer = blocks_in_a_row(geometry.producer, block, axis.producer_stride);
  if (consumer == 0 || producer == 0) return;
  bases_ = geometry_class.bases.size();
  consumer_blocks_ = consumer;
  producer_blocks_ = producer;
  if (block.axis_count == 1) pieces_of_block_ = axis.extent;
}

// How many bases may share lists; 0: not even one can have any.
std::uint64_t ClassLists::bases_per_piece(const ListsRule& rule) const {
  const std::uint64_t blocks = std::max(consumer_blocks_, producer_blocks_);
  if (blocks == 0 || blocks > rule.max_blocks * kMaxOversize) return 0;
  return std::min<std::uint64_t>(std::max<std::uint64_t>(rule.max_blocks / blocks, 1), bases_);
}

bool ClassLists::are_of_use(const ListsRule& rule, std::uint64_t runs, std::uint64_t blocks) const {
  const std::uint64_t bases = bases_per_piece(rule);
  return bases != 0 && blocks * pieces_of_block_ <= runs * kMaxBlocksPerRun &&
         runs * bases >= rule.min_descriptors;
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

BlockGrid ClassLists::grid_of(const GeometryClass& geometry_class, const ListsPiece& piece,
                              bool local_is_producer) const {
  const PairGeometry& geometry = geometry_class.geometry();
  BlockGrid grid;
  grid.block_bytes = geometry_class.block.length;
  grid.local = {geometry.producer_memory,
                geometry.producer_device,
                geometry.producer.block_stride,
                producer_blocks_,
                {}};
  grid.remote = {geometry.consumer_memory,
                 geometry.consumer_device,
                 geometry.consumer.block_stride,
                 consumer_blocks_,
                 {}};
  for (std::uint32_t i = piece.bases_begin; i < piece.bases_end; ++i) {
    grid.local.bases.push_back(geometry_class.bases[i].producer);
    grid.remote.bases.push_back(geometry_class.bases[i].consumer);
  }
  if (!local_is_producer) std::swap(grid.local, grid.remote);
  return grid;
}

}  // namespace kvpush
