#include "copy_plan_parts.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "check.h"

namespace kvpush {

void PlanParts::assign(PatternPlan plan, const Limits& limits) {
  KVPUSH_CHECK(limits.runs > 0 && limits.bytes > 0, "a part has room for something");
  plan_ = std::move(plan);
  cuts_.clear();
  places_.clear();
  parts_ = 0;
  split_long_runs(limits.bytes);
  for (const PatternPlan::Section& section : plan_.sections) {
    Cut cut = cut_section(section, limits);
    cut.first_part = parts_;
    cuts_.push_back(cut);
    const std::size_t bases = section.bases_end - section.bases_begin;
    parts_ += cut.bases_per_part == 0 ? bases * cut.pieces
                                      : (bases + cut.bases_per_part - 1) / cut.bases_per_part;
  }
}

PatternPlan PlanParts::take() {
  parts_ = 0;
  cuts_.clear();
  return std::exchange(plan_, {});
}

// A single run may be longer than a part may be: a whole prompt can be contiguous.
void PlanParts::split_long_runs(std::uint64_t limit) {
  const auto is_long = [limit](const CopyRun& run) { return run.length > limit; };
  if (std::ranges::none_of(plan_.runs, is_long)) return;
  std::vector<CopyRun> runs;
  plan_.total_runs = 0;
  for (PatternPlan::Section& section : plan_.sections) {
    const auto begin = static_cast<std::uint32_t>(runs.size());
    for (std::uint32_t i = section.runs_begin; i < section.runs_end; ++i) {
      CopyRun run = plan_.runs[i];
      for (; run.length > limit; run.length -= limit) {
        runs.push_back({run.local_address, run.remote_address, limit});
        run.local_address += limit;
        run.remote_address += limit;
      }
      runs.push_back(run);
    }
    section.runs_begin = begin;
    section.runs_end = static_cast<std::uint32_t>(runs.size());
    plan_.total_runs += section.total_runs();
  }
  plan_.runs = std::move(runs);
}

PlanParts::Cut PlanParts::cut_section(const PatternPlan::Section& section, const Limits& limits) {
  Cut cut;
  cut.places_begin = static_cast<std::uint32_t>(places_.size());
  std::uint64_t bytes = 0;  // of the piece that is open
  std::uint64_t total = 0;
  places_.push_back(section.runs_begin);
  for (std::uint32_t i = section.runs_begin; i < section.runs_end; ++i) {
    const std::uint64_t length = plan_.runs[i].length;
    if (i - places_.back() == limits.runs || bytes + length > limits.bytes) {
      places_.push_back(i);
      bytes = 0;
    }
    bytes += length;
    total += length;
  }
  cut.pieces = static_cast<std::uint32_t>(places_.size()) - cut.places_begin;
  places_.push_back(section.runs_end);
  if (cut.pieces == 1) {
    const std::uint64_t fit = std::min<std::uint64_t>(
        limits.runs / (section.runs_end - section.runs_begin), limits.bytes / total);
    cut.bases_per_part = static_cast<std::uint32_t>(fit);
  }
  return cut;
}

CopyBatch PlanParts::spell_out(std::size_t part, std::vector<CopyRun>& runs) const {
  KVPUSH_CHECK(part < parts_, "a part that exists");
  const auto next = std::ranges::upper_bound(cuts_, part, {}, &Cut::first_part);
  const auto which = static_cast<std::size_t>(next - cuts_.begin()) - 1;
  const Cut& cut = cuts_[which];
  const PatternPlan::Section& section = plan_.sections[which];
  const std::size_t place = part - cut.first_part;
  std::size_t base = section.bases_begin;
  std::size_t base_end = 0;
  std::size_t begin = section.runs_begin;
  std::size_t end = section.runs_end;
  if (cut.bases_per_part == 0) {
    base += place / cut.pieces;
    base_end = base + 1;
    begin = places_[cut.places_begin + place % cut.pieces];
    end = places_[cut.places_begin + place % cut.pieces + 1];
  } else {
    base += place * cut.bases_per_part;
    base_end = std::min<std::size_t>(base + cut.bases_per_part, section.bases_end);
  }
  runs.clear();
  for (; base < base_end; ++base) {
    const PatternPlan::Base& at = plan_.bases[base];
    for (std::size_t i = begin; i < end; ++i) {
      const CopyRun& run = plan_.runs[i];
      runs.push_back({run.local_address + at.local, run.remote_address + at.remote, run.length});
    }
  }
  return {section.local_kind, section.local_device, section.remote_kind, section.remote_device,
          runs};
}

}  // namespace kvpush
