#include "copy_plan_parts.h"

#include <algorithm>
#include <utility>

#include "check.h"

namespace kvpush {
namespace {

bool same_memory(const PatternPlan::Section& a, const PatternPlan::Section& b) noexcept {
  return a.local_kind == b.local_kind && a.local_device == b.local_device &&
         a.remote_kind == b.remote_kind && a.remote_device == b.remote_device;
}

}  // namespace

void PlanParts::assign(PatternPlan plan, const Limits& limits) {
  KVPUSH_CHECK(limits.runs > 0 && limits.bytes > 0, "a part has room for something");
  plan_ = std::move(plan);
  starts_.clear();
  split_long_runs(limits.bytes);
  bytes_before_.clear();
  std::uint64_t bytes = 0;
  for (const CopyRun& run : plan_.runs) {
    bytes_before_.push_back(bytes);
    bytes += run.length;
  }
  bytes_before_.push_back(bytes);
  Room room;
  for (std::size_t i = 0; i < plan_.sections.size(); ++i) {
    const PatternPlan::Section& section = plan_.sections[i];
    if (i > 0 && !same_memory(section, plan_.sections[i - 1])) room = {};
    for (std::uint32_t base = section.bases_begin; base < section.bases_end; ++base) {
      cut_base({static_cast<std::uint32_t>(i), base, section.runs_begin}, section.runs_end, limits,
               room);
    }
  }
}

PatternPlan PlanParts::take() {
  starts_.clear();
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

// How many of runs [begin, end) there is room for.
std::uint32_t PlanParts::fit(std::uint32_t begin, std::uint32_t end, const Room& room) const {
  const std::uint32_t most = std::min(end - begin, room.runs);
  const std::uint64_t limit = bytes_before_[begin] + room.bytes;
  if (bytes_before_[begin + most] <= limit) return most;
  const auto first = bytes_before_.begin() + begin;
  const auto beyond = std::upper_bound(first, first + most, limit);
  return static_cast<std::uint32_t>(beyond - first) - 1;
}

void PlanParts::cut_base(const Place& from, std::uint32_t runs_end, const Limits& limits,
                         Room& room) {
  for (Place at = from; at.run < runs_end;) {
    std::uint32_t runs = fit(at.run, runs_end, room);
    if (runs == 0) {
      starts_.push_back(at);
      room = {limits.runs, limits.bytes};
      runs = fit(at.run, runs_end, room);
    }
    room.runs -= runs;
    room.bytes -= bytes_before_[at.run + runs] - bytes_before_[at.run];
    at.run += runs;
  }
}

CopyBatch PlanParts::spell_out(std::size_t part, std::vector<CopyRun>& runs) const {
  KVPUSH_CHECK(part < starts_.size(), "a part that exists");
  const Place from = starts_[part];
  const Place end = part + 1 < starts_.size()
                        ? starts_[part + 1]
                        : Place{static_cast<std::uint32_t>(plan_.sections.size()), 0, 0};
  runs.clear();
  Place at = from;
  while (at.section < plan_.sections.size() && at.section <= end.section) {
    const PatternPlan::Section& section = plan_.sections[at.section];
    const bool is_last = at.section == end.section && at.base == end.base;
    const std::uint32_t until = is_last ? end.run : section.runs_end;
    const PatternPlan::Base& base = plan_.bases[at.base];
    for (; at.run < until; ++at.run) {
      const CopyRun& run = plan_.runs[at.run];
      runs.push_back(
          {run.local_address + base.local, run.remote_address + base.remote, run.length});
    }
    if (is_last) break;
    if (++at.base < section.bases_end) {
      at.run = section.runs_begin;
    } else if (++at.section < plan_.sections.size()) {
      at = {at.section, plan_.sections[at.section].bases_begin,
            plan_.sections[at.section].runs_begin};
    }
  }
  const PatternPlan::Section& section = plan_.sections[from.section];
  return {section.local_kind, section.local_device, section.remote_kind, section.remote_device,
          runs};
}

}  // namespace kvpush
