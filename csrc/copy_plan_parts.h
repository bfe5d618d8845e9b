// PlanParts: cuts a plan into parts of bounded size and spells out one at a time.
//
// A part has runs of one pair of memory kinds: what one handle carries. Where a layer fits a part,
// parts hold whole layers, as many as fit; otherwise every layer is cut at the same places. So the
// number of parts is known, and any part found, without looking at each layer's runs.
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

  std::size_t size() const noexcept { return parts_; }
  const PatternPlan& plan() const noexcept { return plan_; }

  // Writes part `part`, below size(), into `runs`, which it replaces; the batch borrows them.
  CopyBatch spell_out(std::size_t part, std::vector<CopyRun>& runs) const;

 private:
  // How one section of the plan is cut.
  struct Cut {
    std::size_t first_part = 0;
    std::uint32_t bases_per_part = 0;  // 0: each base is cut at places_
    std::uint32_t places_begin = 0;    // pieces [places_[i], places_[i + 1]) of its runs
    std::uint32_t pieces = 1;
  };

  void split_long_runs(std::uint64_t limit);
  Cut cut_section(const PatternPlan::Section& section, const Limits& limits);

  PatternPlan plan_;
  std::vector<Cut> cuts_;  // one for each section
  std::vector<std::uint32_t> places_;
  std::size_t parts_ = 0;
};

}  // namespace kvpush
