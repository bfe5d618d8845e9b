// PlanParts: cuts a plan into parts of bounded size and spells out one at a time.
//
// A part has runs of one pair of memory kinds, or blocks of the same prepared lists: what one
// handle carries. Parts are filled in the order of the plan, across its sections and bases, each as
// full as the limits allow. Cutting looks at the pattern's runs once and then at each base, not at
// every run of the plan.
// Thread: any one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy_plan.h"
#include "memory.h"

namespace kvpush {

// What a part is spelled out into; reused from part to part.
struct PartBuffers {
  std::vector<CopyRun> runs;
  std::vector<std::int32_t> local_blocks;
  std::vector<std::int32_t> remote_blocks;
};

class PlanParts {
 public:
  // What one part may hold at most. Longer runs are split. Both positive.
  struct Limits {
    std::uint32_t runs = 0;
    std::uint64_t bytes = 0;
  };

  // Takes the plan over.
  void assign(PatternPlan plan, const Limits& limits);
  // Gives the plan back, for its memory to be used again. No parts are left.
  PatternPlan take();

  std::size_t size() const noexcept { return starts_.size(); }
  const PatternPlan& plan() const noexcept { return plan_; }

  // The prepared lists that have part `part`, below size(); 0: none.
  ListsId lists(std::size_t part) const;
  // Writes the part as runs into `runs`, which the batch borrows.
  CopyBatch spell_out(std::size_t part, std::vector<CopyRun>& runs) const;
  // The same as blocks of lists(part), which is not 0.
  CopyBatch spell_blocks(std::size_t part, PartBuffers& buffers) const;
  // How many runs that part has, and of how many bytes.
  Limits measure(std::size_t part) const;

 private:
  // Where a part starts: a section of the plan, one of its bases, one of its runs.
  struct Place {
    std::uint32_t section = 0;
    std::uint32_t base = 0;
    std::uint32_t run = 0;
  };
  // The part that is being filled.
  struct Room {
    std::uint32_t runs = 0;
    std::uint64_t bytes = 0;
  };

  void split_long_runs(std::uint64_t limit);
  void set_odd_runs_apart();
  void set_apart(std::span<const PatternPlan::Section> alike);
  bool add_blocks(const PatternPlan::Section& section, const CopyRun& run);
  void cut_base(const Place& from, std::uint32_t runs_end, const Limits& limits, Room& room);
  std::uint32_t fit(std::uint32_t begin, std::uint32_t end, const Room& room) const;
  Place end_of(std::size_t part) const;
  template <typename Visit>
  void walk(std::size_t part, const Visit& visit) const;
  CopyBatch empty_batch(std::size_t part) const;

  PatternPlan plan_;
  std::vector<PatternPlan::Section> sections_;  // scratch
  // Of the sections with lists: the blocks of their runs, at the first base, and where those of a
  // section begin.
  std::vector<std::int32_t> local_blocks_;
  std::vector<std::int32_t> remote_blocks_;
  std::vector<std::size_t> blocks_begin_;
  std::vector<Place> starts_;                // of the parts
  std::vector<std::uint64_t> bytes_before_;  // of each of the plan's runs, and of their end
};

}  // namespace kvpush
