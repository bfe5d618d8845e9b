// Copy planning: from (regions, token span, block lists) of two ranks to the longest runs that are
// contiguous on both sides. Pure: no transport, clock or thread; the same code whatever the two
// sides' tensor-parallel sizes, block sizes and layouts are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "memory.h"
#include "region.h"
#include "status.h"
#include "types.h"

namespace kvpush {

// One region of the producer that feeds one region of the consumer, for global heads
// [head_begin, head_end). State regions have an empty head range.
struct RegionPair {
  std::uint32_t producer_region = 0;  // index into the producer rank's list
  std::uint32_t consumer_region = 0;  // index into the consumer rank's list
  std::uint32_t head_begin = 0;
  std::uint32_t head_end = 0;
  bool operator==(const RegionPair&) const = default;
};

// Which rank writes what: pairs(p, c) lists what producer rank p sends to consumer rank c. Every
// (layer, head) of every consumer rank is covered exactly once; where several producers hold the
// same bytes (GQA heads replicated, MLA), the choice spreads the load and is the same on all ranks.
class Assignment {
 public:
  Assignment(std::size_t producers, std::size_t consumers)
      : consumers_(consumers), pairs_(producers * consumers) {}
  const std::vector<RegionPair>& pairs(std::size_t producer, std::size_t consumer) const {
    return pairs_[producer * consumers_ + consumer];
  }
  std::vector<RegionPair>& pairs(std::size_t producer, std::size_t consumer) {
    return pairs_[producer * consumers_ + consumer];
  }

 private:
  std::size_t consumers_;
  std::vector<std::vector<RegionPair>> pairs_;
};

// Refuses what can't be mapped in full; the error names the layer, the field and both values.
Result<Assignment> assign_writers(std::span<const std::vector<Region>> producers,
                                  std::span<const std::vector<Region>> consumers);

// What plan() makes: runs grouped into batches that share memory kinds. Reused from call to call,
// so that a steady state allocates nothing.
struct CopyPlan {
  struct Batch {
    MemoryKind local_kind = MemoryKind::kHost;
    std::uint32_t local_device = 0;
    MemoryKind remote_kind = MemoryKind::kHost;
    std::uint32_t remote_device = 0;
    std::uint32_t begin = 0;  // runs [begin, end)
    std::uint32_t end = 0;
  };
  std::vector<CopyRun> runs;
  std::vector<Batch> batches;
  std::uint64_t bytes = 0;
  // Descriptors without coalescing: one for each block pair, region pair, and K or V.
  std::uint64_t descriptors_before = 0;

  void clear() {
    runs.clear();
    batches.clear();
    bytes = 0;
    descriptors_before = 0;
  }
};

// The same plan, not spelled out: a section's runs are repeated at each of its bases, which are the
// layers of one geometry. Small where a CopyPlan is large, and quick to make: the work is that of
// one layer. PlanParts (copy_plan_parts.h) spells it out piece by piece.
struct PatternPlan {
  struct Base {
    std::uint64_t local = 0;
    std::uint64_t remote = 0;
  };
  struct Section {
    MemoryKind local_kind = MemoryKind::kHost;
    std::uint32_t local_device = 0;
    MemoryKind remote_kind = MemoryKind::kHost;
    std::uint32_t remote_device = 0;
    std::uint32_t runs_begin = 0;  // runs [runs_begin, runs_end), relative to
    std::uint32_t runs_end = 0;
    std::uint32_t bases_begin = 0;  // each of bases [bases_begin, bases_end)
    std::uint32_t bases_end = 0;
    // Where the transport has lists of the section's blocks (BlockGrid), of which its bases are the
    // first: what tells a run's blocks. Runs that are not whole blocks may be among the others.
    ListsId lists = 0;
    std::uint64_t block_bytes = 0;
    std::uint64_t local_stride = 0;
    std::uint64_t remote_stride = 0;
    std::uint32_t local_num_blocks = 0;
    std::uint32_t remote_num_blocks = 0;

    std::uint64_t total_runs() const noexcept {
      return std::uint64_t{runs_end - runs_begin} * (bases_end - bases_begin);
    }
  };
  std::vector<CopyRun> runs;
  std::vector<Base> bases;
  std::vector<Section> sections;
  std::uint64_t total_runs = 0;  // when spelled out
  std::uint64_t bytes = 0;
  std::uint64_t descriptors_before = 0;  // as in CopyPlan

  void clear() {
    runs.clear();
    bases.clear();
    sections.clear();
    total_runs = 0;
    bytes = 0;
    descriptors_before = 0;
  }
};

// The most runs in one plan, spelled out or not: 384 MiB of them. Reached only where layouts differ
// so much that every token of a very long request goes alone; a shorter span then fits.
constexpr std::uint64_t kMaxRuns = std::uint64_t{1} << 24;

// Whether a plan takes in the state regions: they change until the prefill ends, so a plan for an
// early part of the tokens leaves them out.
enum class StateRegions : std::uint8_t { kCopied = 0, kLeftOut = 1 };

// When a transport's lists of all blocks are worth having, and how large each may be.
struct ListsRule {
  // Plans of fewer descriptors for each list are quick as they are.
  std::uint32_t min_descriptors = 256;
  // Of one side's list. 131,072 blocks a side take 2 ms to prepare, the first time 5
  // (NIXL 1.4; 1.0: 5 and 8), and nothing else is done meanwhile. A single base may have twice as
  // many. At most 2^28: indices are ints.
  std::uint32_t max_blocks = 131'072;
};

// Plans copies between this rank and one peer. Built once per peer, when the two meet.
// Thread: any one at a time (it holds scratch memory).
class CopyPlanner {
 public:
  // `local_is_producer` says which side of each pair is local. The pairs must come from
  // assign_writers() on the same regions.
  CopyPlanner(const std::vector<Region>& local, const std::vector<Region>& remote,
              std::vector<RegionPair> pairs, bool local_is_producer);
  ~CopyPlanner();
  CopyPlanner(CopyPlanner&&) noexcept;
  CopyPlanner& operator=(CopyPlanner&&) noexcept;

  // Leaves `out` empty on error: a plan is whole or refused. `out` is cleared first.
  // Tokens of `span` whose block is a hole on the consumer's side, or lies before its first_block,
  // are not needed and are skipped; a consumer's list that ends before the span does is an error.
  // So is a hole or a missing block on the producer's side under a needed token, and any block id
  // out of range on either side. State regions ignore the span: every consumer block that is not a
  // hole gets the producer's block of the same index.
  // The runs of a layer come in rising order of the consumer's addresses, as far as they are equal
  // in shape. A block named twice on the consumer's side is written twice: callers refuse those.
  Status plan(TokenSpan span, const BlockTable& local_blocks, const BlockTable& remote_blocks,
              CopyPlan& out, StateRegions states = StateRegions::kCopied);
  // The same, not spelled out.
  Status plan_pattern(TokenSpan span, const BlockTable& local_blocks,
                      const BlockTable& remote_blocks, PatternPlan& out,
                      StateRegions states = StateRegions::kCopied);

  const std::vector<RegionPair>& pairs() const noexcept { return pairs_; }

  // Prepared lists (Transport::prepare_lists()). A plan names them where its blocks are scattered
  // and there are lists of them. The rule is set before the first plan.
  void set_lists_rule(const ListsRule& rule);
  // Whether plans so far would have had use for lists that nobody has tried to prepare.
  bool wants_lists() const;
  // The next grid of those; null: none.
  const BlockGrid* wanted_grid();
  // What came of wanted_grid(): its lists, or 0 where they can't be had.
  void set_lists(ListsId lists);

 private:
  class Impl;
  std::vector<RegionPair> pairs_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvpush
