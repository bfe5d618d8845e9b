// The geometry behind a copy plan: region pairs sorted into classes that differ in their bases
// only.
//
// What the two sides of a region pair share is a box: axes (page, token, component, head, layer)
// with an extent and one stride for each side, around elements of some bytes. collapse() folds the
// axes that are dense on both sides into the element, which leaves the longest runs.
// Plain values made once for each peer: any thread.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "copy_plan.h"

namespace kvpush {

struct Axis {
  std::uint64_t extent = 1;
  std::uint64_t consumer_stride = 0;
  std::uint64_t producer_stride = 0;
  bool operator==(const Axis&) const = default;
};

// Page, token, component, head, layer.
constexpr std::size_t kMaxAxes = 5;

// Runs of `length` bytes, one for each point of the axes that could not be folded in. The axes
// stand in the order of descending consumer stride, so that walking them visits rising addresses.
struct Shape {
  std::uint64_t length = 0;
  std::size_t axis_count = 0;
  std::array<Axis, kMaxAxes> axes{};

  std::uint64_t runs() const noexcept;
  bool same_axes(const Shape& other) const noexcept;
  // Folds every axis that is dense on both sides into `length`.
  void fold() noexcept;
  // Takes in the runs of another shape that starts `offset` bytes behind this one, if each run of
  // the one goes on as one of the other. False, and nothing changed, if not.
  bool join(std::uint64_t offset, const Shape& next) noexcept;
};

Shape collapse(std::uint64_t element_bytes, std::span<const Axis> axes) noexcept;

// One side of a class. A state is an attention region of one token a block.
struct SideGeometry {
  MemoryKind memory = MemoryKind::kHost;
  std::uint32_t device = 0;
  std::uint32_t group = 0;
  std::uint32_t num_blocks = 0;
  std::uint64_t block_stride = 0;
  std::uint32_t tokens_per_block = 1;
  std::uint32_t tokens_per_page = 1;
  std::uint64_t page_stride = 0;
  std::uint64_t token_stride = 0;
  std::uint64_t component_stride = 0;
  std::uint64_t head_stride = 0;
  auto operator<=>(const SideGeometry&) const = default;

  std::uint64_t token_offset(std::uint32_t token) const noexcept {
    return token / tokens_per_page * page_stride + token % tokens_per_page * token_stride;
  }
};

// All that decides how a region pair is copied, but for its two bases. The order of the fields
// puts classes of equal memory kinds side by side.
struct PairGeometry {
  MemoryKind consumer_memory = MemoryKind::kHost;
  std::uint32_t consumer_device = 0;
  MemoryKind producer_memory = MemoryKind::kHost;
  std::uint32_t producer_device = 0;
  SideGeometry consumer;
  SideGeometry producer;
  bool state = false;
  std::uint32_t components = 1;
  std::uint32_t heads = 1;
  std::uint64_t element_bytes = 0;
  // Layers that lie at equal distances on both sides and whose content joins up.
  std::uint32_t layers = 1;
  std::uint64_t layer_stride = 0;
  auto operator<=>(const PairGeometry&) const = default;

  bool equal_blocks() const noexcept {
    return consumer.tokens_per_block == producer.tokens_per_block;
  }
  // Bytes of one token over the heads, components and layers.
  std::uint64_t token_bytes() const noexcept { return element_bytes * components * heads * layers; }
  // `tokens` tokens within one page of each side.
  Shape page_shape(std::uint32_t tokens) const noexcept;
  // A whole block. Only if has_block_shape().
  Shape block_shape() const noexcept;
  bool has_block_shape() const noexcept;
};

// Addresses of the first copied byte of block 0 on either side.
struct Base {
  std::uint64_t consumer = 0;
  std::uint64_t producer = 0;
};

// Region pairs that are copied alike. A class has one member, or those that share blocks of equal
// size and join up inside them (the keys and the values of a layer, say, where they are regions of
// their own): then whole blocks are copied in fewer runs than each member's alone.
struct GeometryClass {
  struct Member {
    std::uint32_t geometry = 0;  // index into `geometries`
    std::uint64_t offset = 0;    // of its base behind the class's, the same on both sides
    auto operator<=>(const Member&) const = default;
  };
  std::vector<PairGeometry> geometries;  // without duplicates, never empty
  std::vector<Member> members;           // in the order of their offsets, never empty
  std::vector<Base> bases;  // of the first member: one for each region pair or run of joined layers
  std::string layer;        // one of them, for messages
  Shape block;              // a whole block of all members; only if geometry().has_block_shape()

  // What all members have in common may be read from it: groups, memory, blocks and their strides.
  const PairGeometry& geometry() const noexcept { return geometries.front(); }
};

// Sorts the pairs into classes. The regions are valid and the pairs fit them.
std::vector<GeometryClass> make_classes(std::span<const Region> producer,
                                        std::span<const Region> consumer,
                                        std::span<const RegionPair> pairs);

}  // namespace kvpush
