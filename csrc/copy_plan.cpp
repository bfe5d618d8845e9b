#include "copy_plan.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <utility>

#include "check.h"
#include "copy_plan_blocks.h"
#include "copy_plan_geometry.h"
#include "copy_plan_lists.h"

namespace kvpush {
namespace {

// A stretch of a class's content: shape `shape`, of which the runs have grown to `length`.
// Addresses are relative to the class's bases.
struct Item {
  std::uint64_t consumer = 0;
  std::uint64_t producer = 0;
  std::uint64_t length = 0;
  std::uint32_t shape = 0;
};

// Shapes kept for each class, by token count. More than this many different counts come only from
// odd pairs of block sizes; then they are made anew in each plan.
constexpr std::size_t kMaxShapes = 1'024;
constexpr std::uint32_t kNoShape = 0xFFFF'FFFFU;
constexpr std::uint32_t kBlockShape = 0;
constexpr std::uint32_t kKeysAndValues = 2;
constexpr std::size_t kRunsAtATime = 64;

// A class, and what is worked out for it once.
struct PreparedClass {
  GeometryClass geometry_class;
  std::size_t matcher = 0;  // its block lists
  std::vector<Shape> shapes;
  bool whole_blocks = false;  // shapes[kBlockShape] is that of a whole block
  // For each of the class's geometries: by tokens within a page; kNoShape: not made yet.
  std::vector<std::vector<std::uint32_t>> shape_of_tokens;
  ClassLists lists;

  const PairGeometry& geometry() const noexcept { return geometry_class.geometry(); }

  std::uint32_t shape_for(std::uint32_t geometry, std::uint32_t tokens) {
    std::uint32_t& known = shape_of_tokens[geometry][tokens];
    if (known == kNoShape) {
      known = static_cast<std::uint32_t>(shapes.size());
      shapes.push_back(geometry_class.geometries[geometry].page_shape(tokens));
    }
    return known;
  }

  // The usual case: each whole block is one run, or goes on with the one before.
  bool copies_whole_blocks() const { return whole_blocks && shapes[kBlockShape].axis_count == 0; }

  void trim_shapes() {
    if (shapes.size() <= kMaxShapes) return;
    shapes.resize(1);
    for (std::vector<std::uint32_t>& known : shape_of_tokens)
      std::ranges::fill(known, kNoShape);
  }
};

// Reads runs while moving them to another base, so that a vector can take them in one piece.
class MovedRuns {
 public:
  using iterator_category = std::random_access_iterator_tag;
  using value_type = CopyRun;
  using difference_type = std::ptrdiff_t;
  using pointer = const CopyRun*;
  using reference = CopyRun;

  MovedRuns(const CopyRun* at, std::uint64_t local, std::uint64_t remote)
      : at_(at), local_(local), remote_(remote) {}
  CopyRun operator*() const {
    return {at_->local_address + local_, at_->remote_address + remote_, at_->length};
  }
  MovedRuns& operator++() {
    ++at_;
    return *this;
  }
  MovedRuns& operator--() {
    --at_;
    return *this;
  }
  MovedRuns& operator+=(difference_type n) {
    at_ += n;
    return *this;
  }
  friend difference_type operator-(const MovedRuns& a, const MovedRuns& b) { return a.at_ - b.at_; }
  bool operator==(const MovedRuns& other) const { return at_ == other.at_; }
  bool operator!=(const MovedRuns& other) const { return at_ != other.at_; }

 private:
  const CopyRun* at_;
  std::uint64_t local_;
  std::uint64_t remote_;
};

bool goes_on(const CopyRun& last, const CopyRun& run) {
  return last.local_address + last.length == run.local_address &&
         last.remote_address + last.length == run.remote_address;
}

Status out_of_range(const PreparedClass& entry, const char* side, std::uint64_t named,
                    std::uint64_t num_blocks) {
  return Status::error("layer '" + entry.geometry_class.layer + "': block id " +
                       std::to_string(named - 1) + " of the " + side + " is out of range, it has " +
                       std::to_string(num_blocks) + " blocks");
}

Status too_many_runs(std::uint64_t runs) {
  return Status::error("the copy has " + std::to_string(runs) + " pieces or more, at most " +
                       std::to_string(kMaxRuns) + " are allowed; plan fewer tokens at a time");
}

PreparedClass prepare(GeometryClass&& geometry_class) {
  PreparedClass entry;
  entry.geometry_class = std::move(geometry_class);
  entry.whole_blocks = entry.geometry().has_block_shape();
  if (entry.whole_blocks) entry.lists = ClassLists(entry.geometry_class);
  std::size_t room = 1;
  for (const PairGeometry& geometry : entry.geometry_class.geometries) {
    const std::size_t page =
        std::min(geometry.consumer.tokens_per_page, geometry.producer.tokens_per_page);
    entry.shape_of_tokens.emplace_back(page + 1, kNoShape);
    room += std::min(page, kMaxShapes);
  }
  entry.shapes.reserve(room);
  entry.shapes.push_back(entry.geometry_class.block);
  return entry;
}

GroupPairKey group_key(const PairGeometry& geometry) {
  return {geometry.consumer.group, geometry.producer.group, geometry.consumer.tokens_per_block,
          geometry.producer.tokens_per_block, geometry.state};
}

}  // namespace

class CopyPlanner::Impl {
 public:
  Impl(std::vector<GeometryClass> classes, bool local_is_producer)
      : local_is_producer_(local_is_producer) {
    for (GeometryClass& geometry_class : classes) {
      const GroupPairKey key = group_key(geometry_class.geometry());
      auto found = std::ranges::find(matchers_, key, &BlockMatcher::key);
      if (found == matchers_.end()) found = matchers_.insert(found, BlockMatcher(key));
      classes_.push_back(prepare(std::move(geometry_class)));
      classes_.back().matcher = static_cast<std::size_t>(found - matchers_.begin());
    }
  }

  Status plan(TokenSpan span, const BlockTable& local, const BlockTable& remote,
              StateRegions states, PatternPlan& out) {
    const BlockTable& consumer = local_is_producer_ ? remote : local;
    const BlockTable& producer = local_is_producer_ ? local : remote;
    const auto is_left_out = [states](const BlockMatcher& matcher) {
      return matcher.key().state && states == StateRegions::kLeftOut;
    };
    for (BlockMatcher& matcher : matchers_) {
      matcher.clear();
      if (is_left_out(matcher)) continue;
      if (Status status = matcher.look(consumer, producer); !status.is_ok()) return status;
    }
    // Before the blocks are put in order: what that takes may grow with the largest id.
    for (const PreparedClass& entry : classes_) {
      if (Status status = check_range(entry); !status.is_ok()) return status;
    }
    for (BlockMatcher& matcher : matchers_) {
      if (is_left_out(matcher)) continue;
      if (Status status = matcher.match(span, consumer, producer); !status.is_ok()) return status;
    }
    for (PreparedClass& entry : classes_) {
      if (Status status = plan_class(entry, out); !status.is_ok()) return status;
    }
    return Status::ok();
  }

  // Scratch for plans that are spelled out at once.
  PatternPlan& spare() noexcept { return spare_; }

  void set_lists_rule(const ListsRule& rule) { lists_rule_ = rule; }

  bool wants_lists() const { return first_wanting() != classes_.size(); }

  const BlockGrid* wanted_grid() {
    wanting_ = first_wanting();
    if (wanting_ == classes_.size()) return nullptr;
    const PreparedClass& entry = classes_[wanting_];
    wanted_ = entry.lists.grid_of(entry.geometry_class, *entry.lists.untried(), local_is_producer_);
    return &wanted_;
  }

  void set_lists(ListsId lists) {
    KVPUSH_CHECK(wanting_ < classes_.size(), "lists of a grid that was asked for");
    classes_[wanting_].lists.set_tried(lists);
    wanting_ = classes_.size();
  }

 private:
  std::size_t first_wanting() const {
    const auto wants = [](const PreparedClass& entry) { return entry.lists.untried() != nullptr; };
    return static_cast<std::size_t>(std::ranges::find_if(classes_, wants) - classes_.begin());
  }

  Status check_range(const PreparedClass& entry) const {
    const BlockMatcher& matcher = matchers_[entry.matcher];
    const PairGeometry& geometry = entry.geometry();
    if (matcher.consumer_blocks_named() > geometry.consumer.num_blocks) {
      return out_of_range(entry, "consumer", matcher.consumer_blocks_named(),
                          geometry.consumer.num_blocks);
    }
    if (matcher.producer_blocks_named() > geometry.producer.num_blocks) {
      return out_of_range(entry, "producer", matcher.producer_blocks_named(),
                          geometry.producer.num_blocks);
    }
    return Status::ok();
  }

  Status plan_class(PreparedClass& entry, PatternPlan& out) {
    const BlockMatcher& matcher = matchers_[entry.matcher];
    if (matcher.overlaps().empty()) return Status::ok();
    entry.trim_shapes();
    section_begin_ = out.runs.size();
    const auto begin = static_cast<std::uint32_t>(section_begin_);
    if (Status status = add_overlaps(entry, matcher.overlaps(), out.runs); !status.is_ok()) {
      return status;
    }
    add_sections(entry, begin, matcher.overlaps().size(), out);
    out.descriptors_before += matcher.overlaps().size() * descriptors_per_overlap(entry);
    if (out.total_runs > kMaxRuns) return too_many_runs(out.total_runs);
    return Status::ok();
  }

  static std::uint64_t descriptors_per_overlap(const PreparedClass& entry) {
    std::uint64_t count = 0;
    for (const GeometryClass::Member& member : entry.geometry_class.members) {
      const PairGeometry& geometry = entry.geometry_class.geometries[member.geometry];
      // More components than K and V are the elements of keys that are kept transposed.
      const std::uint64_t layers = geometry.layers;
      count += layers * (geometry.components == kKeysAndValues ? kKeysAndValues : 1);
    }
    return count * entry.geometry_class.bases.size();
  }

  Status add_overlaps(PreparedClass& entry, std::span<const Overlap> overlaps,
                      std::vector<CopyRun>& runs) {
    items_.clear();
    const SideGeometry& to = entry.geometry().consumer;
    const SideGeometry& from = entry.geometry().producer;
    // No overlap is as large as this where blocks can't be taken whole.
    const std::uint32_t whole = entry.whole_blocks ? to.tokens_per_block : kNoShape;
    const Shape block = entry.shapes[kBlockShape];
    const bool direct = entry.copies_whole_blocks();  // these need no items
    for (std::size_t i = 0; i < overlaps.size(); ++i) {
      const Overlap& overlap = overlaps[i];
      const std::uint64_t consumer = overlap.consumer_block * to.block_stride;
      const std::uint64_t producer = overlap.producer_block * from.block_stride;
      if (overlap.tokens == whole) {
        if (direct) {
          i += add_whole_blocks(entry, overlaps.subspan(i), runs) - 1;
        } else {
          append(entry, {consumer, producer, block.length, kBlockShape});
        }
        continue;
      }
      for (const GeometryClass::Member& member : entry.geometry_class.members) {
        append_pages(entry, member.geometry, overlap, consumer + member.offset,
                     producer + member.offset);
      }
      if (!direct) continue;
      if (Status status = spell_items(entry, runs); !status.is_ok()) return status;
      items_.clear();
    }
    return spell_items(entry, runs);
  }

  // Runs of the whole blocks that `overlaps` begins with; at least the first is one. Returns how
  // many. Most of a plan's time is spent here where blocks are scattered: the last run stays in
  // registers, and the vector takes many at a time.
  std::size_t add_whole_blocks(const PreparedClass& entry, std::span<const Overlap> overlaps,
                               std::vector<CopyRun>& runs) const {
    const std::uint64_t to_stride = entry.geometry().consumer.block_stride;
    const std::uint64_t from_stride = entry.geometry().producer.block_stride;
    const std::uint64_t length = entry.shapes[kBlockShape].length;
    const std::uint32_t whole = overlaps.front().tokens;
    const auto run_of = [&](const Overlap& overlap) {
      const std::uint64_t consumer = overlap.consumer_block * to_stride;
      const std::uint64_t producer = overlap.producer_block * from_stride;
      return local_is_producer_ ? CopyRun{producer, consumer, length}
                                : CopyRun{consumer, producer, length};
    };
    add_run(run_of(overlaps.front()), runs);
    CopyRun last = runs.back();
    runs.pop_back();
    std::array<CopyRun, kRunsAtATime> made;  // NOLINT(*-member-init): written before it is read
    std::size_t count = 0;
    std::size_t i = 1;
    for (; i < overlaps.size() && overlaps[i].tokens == whole; ++i) {
      const CopyRun run = run_of(overlaps[i]);
      if (goes_on(last, run)) {
        last.length += length;
        continue;
      }
      made[count++] = last;
      last = run;
      if (count < made.size()) continue;
      runs.insert(runs.end(), made.begin(), made.end());
      count = 0;
    }
    runs.insert(runs.end(), made.begin(), made.begin() + static_cast<std::ptrdiff_t>(count));
    runs.push_back(last);
    return i;
  }

  // Cuts one member's part of an overlap at the pages of both sides.
  void append_pages(PreparedClass& entry, std::uint32_t geometry, const Overlap& overlap,
                    std::uint64_t consumer, std::uint64_t producer) {
    const SideGeometry& to = entry.geometry_class.geometries[geometry].consumer;
    const SideGeometry& from = entry.geometry_class.geometries[geometry].producer;
    for (std::uint32_t done = 0; done < overlap.tokens;) {
      const std::uint32_t to_token = overlap.consumer_token + done;
      const std::uint32_t from_token = overlap.producer_token + done;
      const std::uint32_t tokens =
          std::min({overlap.tokens - done, to.tokens_per_page - to_token % to.tokens_per_page,
                    from.tokens_per_page - from_token % from.tokens_per_page});
      const std::uint32_t shape = entry.shape_for(geometry, tokens);
      append(entry, {consumer + to.token_offset(to_token), producer + from.token_offset(from_token),
                     entry.shapes[shape].length, shape});
      done += tokens;
    }
  }

  void append(const PreparedClass& entry, const Item& item) {
    if (!items_.empty()) {
      Item& last = items_.back();
      if (last.consumer + last.length == item.consumer &&
          last.producer + last.length == item.producer &&
          (last.shape == item.shape ||
           entry.shapes[last.shape].same_axes(entry.shapes[item.shape]))) {
        last.length += item.length;
        return;
      }
    }
    items_.push_back(item);
  }

  // Spells out the items, as runs relative to the bases of the class.
  Status spell_items(const PreparedClass& entry, std::vector<CopyRun>& runs) const {
    for (const Item& item : items_) {
      const Shape& shape = entry.shapes[item.shape];
      if (runs.size() + shape.runs() > kMaxRuns) return too_many_runs(runs.size() + shape.runs());
      if (shape.axis_count == 0) {
        add_run(item.consumer, item.producer, item.length, runs);
      } else {
        add_shape(item, shape, runs);
      }
    }
    return Status::ok();
  }

  void add_shape(const Item& item, Shape shape, std::vector<CopyRun>& runs) const {
    if (item.length != shape.length) {
      shape.length = item.length;  // merged blocks may have become as long as the next axis is wide
      shape.fold();
    }
    add_axes(shape, 0, item.consumer, item.producer, runs);
  }

  // At most kMaxAxes deep.
  void add_axes(const Shape& shape, std::size_t depth, std::uint64_t consumer,
                std::uint64_t producer, std::vector<CopyRun>& runs) const {
    if (depth == shape.axis_count) return add_run(consumer, producer, shape.length, runs);
    const Axis& axis = shape.axes[depth];
    for (std::uint64_t i = 0; i < axis.extent; ++i) {
      add_axes(shape, depth + 1, consumer + i * axis.consumer_stride,
               producer + i * axis.producer_stride, runs);
    }
  }

  void add_run(std::uint64_t consumer, std::uint64_t producer, std::uint64_t length,
               std::vector<CopyRun>& runs) const {
    add_run(local_is_producer_ ? CopyRun{producer, consumer, length}
                               : CopyRun{consumer, producer, length},
            runs);
  }

  // The last run of one item may go on as the first of the next, whatever their shapes.
  void add_run(const CopyRun& run, std::vector<CopyRun>& runs) const {
    if (runs.size() != section_begin_ && goes_on(runs.back(), run)) {
      runs.back().length += run.length;
    } else {
      runs.push_back(run);
    }
  }

  // The runs from `runs_begin` on, at each of the class's bases.
  void add_sections(PreparedClass& entry, std::uint32_t runs_begin, std::uint64_t blocks,
                    PatternPlan& out) {
    const std::vector<Base>& bases = entry.geometry_class.bases;
    const PatternPlan::Section section = section_of(entry, runs_begin, out);
    const auto first_base = static_cast<std::uint32_t>(out.bases.size());
    for (const Base& base : bases) {
      out.bases.push_back({local_is_producer_ ? base.producer : base.consumer,
                           local_is_producer_ ? base.consumer : base.producer});
    }
    const std::uint64_t runs = section.runs_end - runs_begin;
    std::uint64_t bytes = 0;
    for (std::size_t i = runs_begin; i < out.runs.size(); ++i)
      bytes += out.runs[i].length;
    out.bytes += bytes * bases.size();
    out.total_runs += runs * bases.size();
    if (entry.lists.are_of_use(lists_rule_, runs, blocks)) {
      entry.lists.want(lists_rule_);
      if (entry.lists.has_any()) return add_pieces(entry, section, first_base, out);
    }
    add_section(section, first_base, first_base + static_cast<std::uint32_t>(bases.size()), 0, out);
  }

  PatternPlan::Section section_of(const PreparedClass& entry, std::uint32_t runs_begin,
                                  const PatternPlan& out) const {
    const PairGeometry& geometry = entry.geometry();
    PatternPlan::Section section;
    section.local_kind = geometry.producer_memory;
    section.local_device = geometry.producer_device;
    section.remote_kind = geometry.consumer_memory;
    section.remote_device = geometry.consumer_device;
    section.block_bytes = entry.shapes[kBlockShape].length;
    section.local_stride = geometry.producer.block_stride;
    section.remote_stride = geometry.consumer.block_stride;
    section.local_num_blocks = entry.lists.producer_blocks();
    section.remote_num_blocks = entry.lists.consumer_blocks();
    if (!local_is_producer_) {
      std::swap(section.local_kind, section.remote_kind);
      std::swap(section.local_device, section.remote_device);
      std::swap(section.local_stride, section.remote_stride);
      std::swap(section.local_num_blocks, section.remote_num_blocks);
    }
    section.runs_begin = runs_begin;
    section.runs_end = static_cast<std::uint32_t>(out.runs.size());
    return section;
  }

  static void add_section(PatternPlan::Section section, std::uint32_t bases_begin,
                          std::uint32_t bases_end, ListsId lists, PatternPlan& out) {
    section.bases_begin = bases_begin;
    section.bases_end = bases_end;
    section.lists = lists;
    out.sections.push_back(section);
  }

  static void add_pieces(const PreparedClass& entry, const PatternPlan::Section& section,
                         std::uint32_t first_base, PatternPlan& out) {
    for (const ListsPiece& piece : entry.lists.pieces()) {
      add_section(section, first_base + piece.bases_begin, first_base + piece.bases_end,
                  piece.lists, out);
    }
  }

  bool local_is_producer_;
  std::vector<PreparedClass> classes_;
  std::vector<BlockMatcher> matchers_;
  std::vector<Item> items_;        // scratch
  std::size_t section_begin_ = 0;  // of the runs that are being made
  PatternPlan spare_;              // scratch
  ListsRule lists_rule_;
  BlockGrid wanted_;
  std::size_t wanting_ = 0;  // the class whose next piece it is of
};

namespace {

void add_batch(const PatternPlan::Section& section, CopyPlan& out) {
  const auto end = static_cast<std::uint32_t>(out.runs.size());
  if (!out.batches.empty()) {
    CopyPlan::Batch& last = out.batches.back();
    if (last.local_kind == section.local_kind && last.local_device == section.local_device &&
        last.remote_kind == section.remote_kind && last.remote_device == section.remote_device) {
      last.end = end;
      return;
    }
  }
  const std::uint32_t begin = out.batches.empty() ? 0 : out.batches.back().end;
  out.batches.push_back({section.local_kind, section.local_device, section.remote_kind,
                         section.remote_device, begin, end});
}

void spell_out(const PatternPlan& plan, CopyPlan& out) {
  out.runs.reserve(plan.total_runs);
  for (const PatternPlan::Section& section : plan.sections) {
    const CopyRun* first = plan.runs.data() + section.runs_begin;
    const CopyRun* last = plan.runs.data() + section.runs_end;
    for (std::uint32_t i = section.bases_begin; i < section.bases_end; ++i) {
      const PatternPlan::Base& base = plan.bases[i];
      out.runs.insert(out.runs.end(), MovedRuns(first, base.local, base.remote),
                      MovedRuns(last, base.local, base.remote));
    }
    add_batch(section, out);
  }
  out.bytes = plan.bytes;
  out.descriptors_before = plan.descriptors_before;
}

}  // namespace

CopyPlanner::CopyPlanner(const std::vector<Region>& local, const std::vector<Region>& remote,
                         std::vector<RegionPair> pairs, bool local_is_producer)
    : pairs_(std::move(pairs)) {
  const std::vector<Region>& producer = local_is_producer ? local : remote;
  const std::vector<Region>& consumer = local_is_producer ? remote : local;
  impl_ = std::make_unique<Impl>(make_classes(producer, consumer, pairs_), local_is_producer);
}

CopyPlanner::~CopyPlanner() = default;
CopyPlanner::CopyPlanner(CopyPlanner&&) noexcept = default;
CopyPlanner& CopyPlanner::operator=(CopyPlanner&&) noexcept = default;

Status CopyPlanner::plan_pattern(TokenSpan span, const BlockTable& local_blocks,
                                 const BlockTable& remote_blocks, PatternPlan& out,
                                 StateRegions states) {
  out.clear();
  Status status = impl_->plan(span, local_blocks, remote_blocks, states, out);
  if (!status.is_ok()) out.clear();
  return status;
}

void CopyPlanner::set_lists_rule(const ListsRule& rule) {
  impl_->set_lists_rule(rule);
}

bool CopyPlanner::wants_lists() const {
  return impl_->wants_lists();
}

const BlockGrid* CopyPlanner::wanted_grid() {
  return impl_->wanted_grid();
}

void CopyPlanner::set_lists(ListsId lists) {
  impl_->set_lists(lists);
}

Status CopyPlanner::plan(TokenSpan span, const BlockTable& local_blocks,
                         const BlockTable& remote_blocks, CopyPlan& out, StateRegions states) {
  out.clear();
  PatternPlan& pattern = impl_->spare();
  Status status = plan_pattern(span, local_blocks, remote_blocks, pattern, states);
  if (!status.is_ok()) return status;
  spell_out(pattern, out);
  return status;
}

}  // namespace kvpush
