// Runs of plans that are cut differently, made comparable.
#pragma once

#include <vector>

#include "memory.h"

namespace kvpush {

// Joins runs that follow each other on both sides.
inline std::vector<CopyRun> joined(const std::vector<CopyRun>& runs) {
  std::vector<CopyRun> out;
  for (const CopyRun& run : runs) {
    if (!out.empty() && out.back().local_address + out.back().length == run.local_address &&
        out.back().remote_address + out.back().length == run.remote_address) {
      out.back().length += run.length;
    } else {
      out.push_back(run);
    }
  }
  return out;
}

}  // namespace kvpush
