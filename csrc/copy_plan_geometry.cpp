#include "copy_plan_geometry.h"

#include <algorithm>
#include <map>
#include <utility>

#include "check.h"

namespace kvpush {
namespace {

SideGeometry side_geometry(const Region& region, std::uint64_t element_bytes) {
  SideGeometry side;
  side.memory = region.memory;
  side.device = region.device;
  side.group = region.group;
  side.num_blocks = region.num_blocks;
  side.block_stride = region.block_stride;
  if (region.kind == RegionKind::kState) return side;
  side.tokens_per_block = region.tokens_per_block;
  side.tokens_per_page = region.tokens_per_page;
  side.page_stride = region.page_stride;
  side.token_stride = region.token_stride;
  side.head_stride = region.head_stride;
  // Packed content, seen as components, has them one after the other.
  side.component_stride = region.components == 1 ? element_bytes : region.component_stride;
  // Different words for one layout must give one class: pages that make no difference are taken
  // away, and so are the strides of axes that have one point only.
  if (side.tokens_per_page == 1) side.token_stride = side.page_stride;
  if (side.page_stride == side.tokens_per_page * side.token_stride) {
    side.tokens_per_page = side.tokens_per_block;
  }
  if (side.tokens_per_page == side.tokens_per_block) side.page_stride = 0;
  if (side.tokens_per_block == 1) side.token_stride = 0;
  return side;
}

PairGeometry pair_geometry(const Region& producer, const Region& consumer, const RegionPair& pair) {
  PairGeometry geometry;
  geometry.state = consumer.kind == RegionKind::kState;
  if (geometry.state) {
    geometry.element_bytes = consumer.state_bytes;
  } else {
    geometry.element_bytes = std::min(producer.element_bytes, consumer.element_bytes);
    geometry.components = std::max(producer.components, consumer.components);
    geometry.heads = pair.head_end - pair.head_begin;
  }
  geometry.consumer = side_geometry(consumer, geometry.element_bytes);
  geometry.producer = side_geometry(producer, geometry.element_bytes);
  if (geometry.components == 1) {
    geometry.consumer.component_stride = geometry.producer.component_stride = 0;
  }
  if (geometry.heads == 1) geometry.consumer.head_stride = geometry.producer.head_stride = 0;
  geometry.consumer_memory = consumer.memory;
  geometry.consumer_device = consumer.device;
  geometry.producer_memory = producer.memory;
  geometry.producer_device = producer.device;
  return geometry;
}

std::uint64_t first_byte(const Region& region, const RegionPair& pair) {
  if (region.kind == RegionKind::kState) return region.base;
  return region.base + (pair.head_begin - region.first_head) * region.head_stride;
}

void check_pair(const Region& producer, const Region& consumer, const RegionPair& pair) {
  KVPUSH_CHECK(producer.kind == consumer.kind, "a region pair joins regions of one kind");
  if (consumer.kind == RegionKind::kState) return;
  const auto covers = [&](const Region& region) {
    return pair.head_begin >= region.first_head &&
           pair.head_end <= region.first_head + region.heads;
  };
  KVPUSH_CHECK(pair.head_begin < pair.head_end && covers(producer) && covers(consumer),
               "a region pair's heads are held by both of its regions");
}

// Whether seeing the layers as one more axis makes longer runs.
bool layers_join(const PairGeometry& one, const PairGeometry& joined) {
  const std::uint32_t page = std::min(one.consumer.tokens_per_page, one.producer.tokens_per_page);
  if (joined.page_shape(page).runs() < joined.layers * one.page_shape(page).runs()) return true;
  return one.has_block_shape() &&
         joined.block_shape().runs() < joined.layers * one.block_shape().runs();
}

// Region pairs of one geometry, before they are joined with others.
struct Alike {
  PairGeometry geometry;
  std::vector<Base> bases;
  std::string layer;
};

// Splits the pairs of one geometry into runs of layers that lie at equal distances on both sides.
void join_layers(Alike&& all, std::vector<Alike>& out) {
  std::ranges::sort(all.bases, {}, &Base::consumer);
  std::map<PairGeometry, std::vector<Base>> joined;
  const std::vector<Base>& bases = all.bases;
  for (std::size_t i = 0; i < bases.size();) {
    std::size_t end = i + 1;
    std::uint64_t stride = 0;
    if (end < bases.size()) stride = bases[end].consumer - bases[i].consumer;
    while (end < bases.size() && stride != 0 &&
           bases[end].consumer - bases[end - 1].consumer == stride &&
           bases[end].producer - bases[end - 1].producer == stride) {
      ++end;
    }
    PairGeometry geometry = all.geometry;
    geometry.layers = static_cast<std::uint32_t>(end - i);
    geometry.layer_stride = stride;
    if (geometry.layers > 1 && layers_join(all.geometry, geometry)) {
      joined[geometry].push_back(bases[i]);
      i = end;
    } else {
      joined[all.geometry].push_back(bases[i]);
      ++i;
    }
  }
  for (auto& [geometry, starts] : joined)
    out.push_back({geometry, std::move(starts), all.layer});
}

// Whether two geometries go by the same blocks, and at the same distances: what joining whole
// blocks takes.
bool share_blocks(const PairGeometry& a, const PairGeometry& b) {
  const auto same_side = [](const SideGeometry& one, const SideGeometry& other) {
    return one.group == other.group && one.memory == other.memory && one.device == other.device &&
           one.num_blocks == other.num_blocks && one.block_stride == other.block_stride &&
           one.tokens_per_block == other.tokens_per_block;
  };
  return a.state == b.state && same_side(a.consumer, b.consumer) &&
         same_side(a.producer, b.producer);
}

// A class in the making: members that have joined up so far, at one base.
struct Joined {
  std::vector<std::pair<std::size_t, std::uint64_t>> members;  // index into Alike, offset
  Base base;
  Shape block;  // of all members; only if has_block
  bool has_block = false;
};

// Takes `next`, which lies behind `one`, into it if whole blocks of the two join up.
bool join_up(const std::vector<Alike>& alike, Joined& one, const Joined& next) {
  const PairGeometry& geometry = alike[one.members.front().first].geometry;
  const std::uint64_t offset = next.base.consumer - one.base.consumer;
  if (!one.has_block || !next.has_block || next.base.producer - one.base.producer != offset ||
      offset >= std::min(geometry.consumer.block_stride, geometry.producer.block_stride) ||
      !share_blocks(geometry, alike[next.members.front().first].geometry) ||
      !one.block.join(offset, next.block)) {
    return false;
  }
  for (const auto& [which, behind] : next.members)
    one.members.emplace_back(which, offset + behind);
  return true;
}

GeometryClass make_class(const std::vector<Alike>& alike, const Joined& joined) {
  GeometryClass out;
  out.layer = alike[joined.members.front().first].layer;
  out.bases = {joined.base};
  for (const auto& [which, offset] : joined.members) {
    const PairGeometry& geometry = alike[which].geometry;
    auto known = std::ranges::find(out.geometries, geometry);
    if (known == out.geometries.end()) known = out.geometries.insert(known, geometry);
    out.members.push_back({static_cast<std::uint32_t>(known - out.geometries.begin()), offset});
  }
  out.block = joined.block;
  return out;
}

// What joins up is neighbours: rising by their bases, each goes into the one before where it can,
// and the two together may then go into the one before that.
std::vector<Joined> join_neighbours(const std::vector<Alike>& alike) {
  std::vector<Joined> all;
  for (std::size_t i = 0; i < alike.size(); ++i) {
    const PairGeometry& geometry = alike[i].geometry;
    const bool has_block = geometry.has_block_shape();
    for (const Base& base : alike[i].bases)
      all.push_back({{{i, 0}}, base, has_block ? geometry.block_shape() : Shape{}, has_block});
  }
  std::ranges::stable_sort(all, {}, [](const Joined& joined) { return joined.base.consumer; });
  std::vector<Joined> out;
  for (Joined& next : all) {
    out.push_back(std::move(next));
    while (out.size() > 1 && join_up(alike, out[out.size() - 2], out.back()))
      out.pop_back();
  }
  return out;
}

std::vector<GeometryClass> join_regions(const std::vector<Alike>& alike) {
  using Key = std::pair<std::vector<PairGeometry>, std::vector<GeometryClass::Member>>;
  std::map<Key, GeometryClass> found;
  for (const Joined& joined : join_neighbours(alike)) {
    GeometryClass next = make_class(alike, joined);
    GeometryClass& entry = found[{next.geometries, next.members}];
    if (entry.bases.empty()) {
      entry = std::move(next);
    } else {
      entry.bases.push_back(joined.base);
    }
  }
  std::vector<GeometryClass> classes;
  for (auto& [key, entry] : found)
    classes.push_back(std::move(entry));
  return classes;
}

}  // namespace

std::uint64_t Shape::runs() const noexcept {
  std::uint64_t count = 1;
  for (std::size_t i = 0; i < axis_count; ++i)
    count *= axes[i].extent;
  return count;
}

bool Shape::same_axes(const Shape& other) const noexcept {
  return axis_count == other.axis_count &&
         std::equal(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(axis_count),
                    other.axes.begin());
}

void Shape::fold() noexcept {
  for (std::size_t i = 0; i < axis_count;) {
    const Axis axis = axes[i];
    if (axis.consumer_stride != length || axis.producer_stride != length) {
      ++i;
      continue;
    }
    length *= axis.extent;
    std::copy(axes.begin() + static_cast<std::ptrdiff_t>(i) + 1,
              axes.begin() + static_cast<std::ptrdiff_t>(axis_count),
              axes.begin() + static_cast<std::ptrdiff_t>(i));
    --axis_count;
    i = 0;
  }
}

bool Shape::join(std::uint64_t offset, const Shape& next) noexcept {
  if (offset != length || !same_axes(next)) return false;
  length += next.length;
  fold();  // the longer runs may fill an axis that has gaps for each shape alone
  return true;
}

Shape collapse(std::uint64_t element_bytes, std::span<const Axis> axes) noexcept {
  Shape shape;
  shape.length = element_bytes;
  for (const Axis& axis : axes) {
    if (axis.extent == 1) continue;
    std::size_t place = shape.axis_count++;
    for (; place > 0 && shape.axes[place - 1].consumer_stride < axis.consumer_stride; --place) {
      shape.axes[place] = shape.axes[place - 1];
    }
    shape.axes[place] = axis;
  }
  shape.fold();
  return shape;
}

Shape PairGeometry::page_shape(std::uint32_t tokens) const noexcept {
  const std::array axes{
      Axis{tokens, consumer.token_stride, producer.token_stride},
      Axis{components, consumer.component_stride, producer.component_stride},
      Axis{heads, consumer.head_stride, producer.head_stride},
      Axis{layers, layer_stride, layer_stride},
  };
  return collapse(element_bytes, axes);
}

bool PairGeometry::has_block_shape() const noexcept {
  return equal_blocks() && (consumer.tokens_per_page == producer.tokens_per_page ||
                            consumer.tokens_per_page == consumer.tokens_per_block ||
                            producer.tokens_per_page == producer.tokens_per_block);
}

Shape PairGeometry::block_shape() const noexcept {
  const std::uint32_t page = std::min(consumer.tokens_per_page, producer.tokens_per_page);
  // A side without pages is seen as if it had the other's.
  const auto page_stride = [page](const SideGeometry& side) {
    return side.tokens_per_page == page ? side.page_stride : page * side.token_stride;
  };
  const std::array axes{
      Axis{consumer.tokens_per_block / page, page_stride(consumer), page_stride(producer)},
      Axis{page, consumer.token_stride, producer.token_stride},
      Axis{components, consumer.component_stride, producer.component_stride},
      Axis{heads, consumer.head_stride, producer.head_stride},
      Axis{layers, layer_stride, layer_stride},
  };
  return collapse(element_bytes, axes);
}

std::vector<GeometryClass> make_classes(std::span<const Region> producer,
                                        std::span<const Region> consumer,
                                        std::span<const RegionPair> pairs) {
  std::map<PairGeometry, Alike> found;
  for (const RegionPair& pair : pairs) {
    KVPUSH_CHECK(pair.producer_region < producer.size() && pair.consumer_region < consumer.size(),
                 "a region pair names regions that exist");
    const Region& from = producer[pair.producer_region];
    const Region& to = consumer[pair.consumer_region];
    check_pair(from, to, pair);
    const PairGeometry geometry = pair_geometry(from, to, pair);
    Alike& entry = found[geometry];
    if (entry.bases.empty()) {
      entry.geometry = geometry;
      entry.layer = to.layer;
    }
    entry.bases.push_back({first_byte(to, pair), first_byte(from, pair)});
  }
  std::vector<Alike> alike;
  for (auto& [geometry, entry] : found)
    join_layers(std::move(entry), alike);
  return join_regions(alike);
}

}  // namespace kvpush
