// Memory and copies as plain values: what a region lies in, what a plan is made of. Any thread.
#pragma once

#include <cstdint>
#include <span>

namespace kvpush {

enum class MemoryKind : std::uint8_t { kHost = 0, kDevice = 1 };

// One piece of memory registered for transfers: [address, address + length).
struct MemoryRange {
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  MemoryKind kind = MemoryKind::kHost;
  std::uint32_t device = 0;  // accelerator ordinal; 0 for host memory
};

// One contiguous copy between local and remote memory.
struct CopyRun {
  std::uint64_t local_address = 0;
  std::uint64_t remote_address = 0;
  std::uint64_t length = 0;
  bool operator==(const CopyRun&) const = default;
};

// A batch of runs that share memory kind and device on each side: what one handle carries.
struct CopyBatch {
  MemoryKind local_kind = MemoryKind::kHost;
  std::uint32_t local_device = 0;
  MemoryKind remote_kind = MemoryKind::kHost;
  std::uint32_t remote_device = 0;
  std::span<const CopyRun> runs;  // borrowed for the call only
};

}  // namespace kvpush
