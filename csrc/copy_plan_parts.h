// PlanParts: cuts a plan into parts of bounded size and spells out one at a time.
//
// A part has runs of one pair of memory kinds: what one handle carries. Parts are filled in the
// order of the plan, across its sections and bases, each as full as the limits allow. Cutting looks
// at the pattern's runs once and then at each base, not at every run of the plan.
// Thread: any one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy_plan.h"
#include "memory.h"

namespace kvpush {

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

  // Writes part `part`, below size(), into `runs`, which it replaces; the batch borrows them.
  CopyBatch spell_out(std::size_t part, std::vector<CopyRun>& runs) const;

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
  void cut_base(const Place& from, std::uint32_t runs_end, const Limits& limits, Room& room);
  std::uint32_t fit(std::uint32_t begin, std::uint32_t end, const Room& room) const;

  PatternPlan plan_;
  std::vector<Place> starts_;                // of the parts
  std::vector<std::uint64_t> bytes_before_;  // of each of the plan's runs, and of their end
};

}  // namespace kvpush
