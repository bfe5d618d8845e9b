#include "copy_plan_parts.h"

#include <algorithm>
#include <utility>

#include "check.h"

namespace kvpush {
namespace {

bool may_share_a_part(const PatternPlan::Section& a, const PatternPlan::Section& b) noexcept {
  return a.local_kind == b.local_kind && a.local_device == b.local_device &&
         a.remote_kind == b.remote_kind && a.remote_device == b.remote_device && a.lists == b.lists;
}

}  // namespace

void PlanParts::assign(PatternPlan plan, const Limits& limits) {
  KVPUSH_CHECK(limits.runs > 0 && limits.bytes > 0, "a part has room for something");
  plan_ = std::move(plan);
  starts_.clear();
  split_long_runs(limits.bytes);
  set_odd_runs_apart();
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
    if (i > 0 && !may_share_a_part(section, plan_.sections[i - 1])) room = {};
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

// Adds a run's blocks. False, and nothing added, where it is not whole blocks of the lists.
bool PlanParts::add_blocks(const PatternPlan::Section& section, const CopyRun& run) {
  const std::uint64_t local = run.local_address / section.local_stride;
  const std::uint64_t remote = run.remote_address / section.remote_stride;
  if (local * section.local_stride != run.local_address ||
      remote * section.remote_stride != run.remote_address) {
    return false;
  }
  std::uint64_t count = 1;
  if (run.length != section.block_bytes) {
    const bool dense =
        section.local_stride == section.block_bytes && section.remote_stride == section.block_bytes;
    count = run.length / section.block_bytes;
    if (!dense || count * section.block_bytes != run.length) return false;
  }
  if (local + count > section.local_num_blocks || remote + count > section.remote_num_blocks) {
    return false;
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    local_blocks_.push_back(static_cast<std::int32_t>(local + i));
    remote_blocks_.push_back(static_cast<std::int32_t>(remote + i));
  }
  return true;
}

// In a section with lists, runs that are not whole blocks become a section of their own without:
// the first and the last block of a span may be needed in part.
void PlanParts::set_odd_runs_apart() {
  const auto has_lists = [](const PatternPlan::Section& section) { return section.lists != 0; };
  if (std::ranges::none_of(plan_.sections, has_lists)) return;
  sections_.clear();
  local_blocks_.clear();
  remote_blocks_.clear();
  blocks_begin_.clear();
  for (std::size_t i = 0; i < plan_.sections.size();) {
    std::size_t end = i + 1;
    while (end < plan_.sections.size() &&
           plan_.sections[end].runs_begin == plan_.sections[i].runs_begin)
      ++end;
    const auto first = plan_.sections.begin() + static_cast<std::ptrdiff_t>(i);
    set_apart({first, first + static_cast<std::ptrdiff_t>(end - i)});
    i = end;
  }
  plan_.sections.swap(sections_);
}

// `alike` have the same runs and consecutive bases.
void PlanParts::set_apart(std::span<const PatternPlan::Section> alike) {
  const PatternPlan::Section& any = alike.front();
  const auto has_lists = [](const PatternPlan::Section& section) { return section.lists != 0; };
  std::uint32_t odd_begin = any.runs_end;
  const std::size_t blocks_begin = local_blocks_.size();
  if (std::ranges::any_of(alike, has_lists)) {
    for (std::uint32_t i = any.runs_begin; i < odd_begin;) {
      if (add_blocks(any, plan_.runs[i])) {
        ++i;
      } else {
        std::swap(plan_.runs[i], plan_.runs[--odd_begin]);
      }
    }
  }
  const auto add = [&](PatternPlan::Section section) {
    if (section.runs_begin == section.runs_end) return;
    sections_.push_back(section);
    blocks_begin_.push_back(blocks_begin);
  };
  for (PatternPlan::Section section : alike) {
    section.runs_end = odd_begin;
    add(section);
  }
  PatternPlan::Section odd = any;
  odd.lists = 0;
  odd.runs_begin = odd_begin;
  odd.bases_end = alike.back().bases_end;
  add(odd);
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

PlanParts::Place PlanParts::end_of(std::size_t part) const {
  if (part + 1 < starts_.size()) return starts_[part + 1];
  return {static_cast<std::uint32_t>(plan_.sections.size()), 0, 0};
}

// Calls visit(section, base, first run, end of the runs) for what the part has at each base.
template <typename Visit>
void PlanParts::walk(std::size_t part, const Visit& visit) const {
  KVPUSH_CHECK(part < starts_.size(), "a part that exists");
  const Place end = end_of(part);
  Place at = starts_[part];
  while (at.section < plan_.sections.size() && at.section <= end.section) {
    const PatternPlan::Section& section = plan_.sections[at.section];
    const bool is_last = at.section == end.section && at.base == end.base;
    const std::uint32_t runs_end = is_last ? end.run : section.runs_end;
    if (at.run != runs_end) visit(section, at.base, at.run, runs_end);
    if (is_last) return;
    if (++at.base < section.bases_end) {
      at.run = section.runs_begin;
    } else if (++at.section < plan_.sections.size()) {
      at = {at.section, plan_.sections[at.section].bases_begin,
            plan_.sections[at.section].runs_begin};
    }
  }
}

PlanParts::Limits PlanParts::measure(std::size_t part) const {
  Limits total;
  walk(part, [&](const PatternPlan::Section&, std::uint32_t, std::uint32_t run, std::uint32_t end) {
    total.runs += end - run;
    total.bytes += bytes_before_[end] - bytes_before_[run];
  });
  return total;
}

ListsId PlanParts::lists(std::size_t part) const {
  KVPUSH_CHECK(part < starts_.size(), "a part that exists");
  return plan_.sections[starts_[part].section].lists;
}

// Where its bytes lie.
CopyBatch PlanParts::empty_batch(std::size_t part) const {
  KVPUSH_CHECK(part < starts_.size(), "a part that exists");
  const PatternPlan::Section& section = plan_.sections[starts_[part].section];
  CopyBatch batch;
  batch.local_kind = section.local_kind;
  batch.local_device = section.local_device;
  batch.remote_kind = section.remote_kind;
  batch.remote_device = section.remote_device;
  return batch;
}

CopyBatch PlanParts::spell_out(std::size_t part, std::vector<CopyRun>& runs) const {
  CopyBatch batch = empty_batch(part);
  runs.clear();
  walk(part, [&](const PatternPlan::Section&, std::uint32_t at, std::uint32_t run,
                 std::uint32_t end) {
    const PatternPlan::Base& base = plan_.bases[at];
    for (; run < end; ++run) {
      const CopyRun& of = plan_.runs[run];
      runs.push_back({of.local_address + base.local, of.remote_address + base.remote, of.length});
    }
  });
  batch.runs = runs;
  return batch;
}

CopyBatch PlanParts::spell_blocks(std::size_t part, PartBuffers& buffers) const {
  CopyBatch batch = empty_batch(part);
  batch.lists = lists(part);
  KVPUSH_CHECK(batch.lists != 0, "a part that has lists");
  const std::uint32_t index = starts_[part].section;
  buffers.local_blocks.clear();
  buffers.remote_blocks.clear();
  walk(part, [&](const PatternPlan::Section& section, std::uint32_t at, std::uint32_t run,
                 std::uint32_t end) {
    const std::uint64_t before = bytes_before_[section.runs_begin];
    const std::uint64_t first = (bytes_before_[run] - before) / section.block_bytes;
    const std::uint64_t last = (bytes_before_[end] - before) / section.block_bytes;
    batch.adjoining = batch.adjoining || last - first != end - run;
    // A grid has at most as many blocks as an int can tell.
    const std::uint32_t base = at - section.bases_begin;
    const auto add = [&](const std::vector<std::int32_t>& from, std::uint32_t num_blocks,
                         std::vector<std::int32_t>& to) {
      const auto begin = static_cast<std::int32_t>(base * num_blocks);
      const std::size_t size = to.size();
      to.resize(size + (last - first));
      std::transform(from.begin() + static_cast<std::ptrdiff_t>(blocks_begin_[index] + first),
                     from.begin() + static_cast<std::ptrdiff_t>(blocks_begin_[index] + last),
                     to.begin() + static_cast<std::ptrdiff_t>(size),
                     [begin](std::int32_t block) { return begin + block; });
    };
    add(local_blocks_, section.local_num_blocks, buffers.local_blocks);
    add(remote_blocks_, section.remote_num_blocks, buffers.remote_blocks);
  });
  batch.local_blocks = buffers.local_blocks;
  batch.remote_blocks = buffers.remote_blocks;
  return batch;
}

}  // namespace kvpush
