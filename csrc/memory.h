// Memory and copies as plain values: what a region lies in, what a plan is made of. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

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

// Blocks of one side that lie at equal distances, `num_blocks` of them at each of some bases: block
// `i` of base `b` begins at bases[b] + i * stride, and its index is b * num_blocks + i.
struct BlockSeries {
  MemoryKind kind = MemoryKind::kHost;
  std::uint32_t device = 0;
  std::uint64_t stride = 0;
  std::uint32_t num_blocks = 0;
  std::vector<std::uint64_t> bases;

  std::uint64_t size() const noexcept { return std::uint64_t{num_blocks} * bases.size(); }
  std::uint64_t address(std::uint64_t index) const {
    return bases[static_cast<std::size_t>(index / num_blocks)] + index % num_blocks * stride;
  }
};

// All blocks of both sides that may be copied to one another: what a transport can prepare lists of
// (Transport::prepare_lists()).
struct BlockGrid {
  std::uint64_t block_bytes = 0;  // of each block that is copied
  BlockSeries local;
  BlockSeries remote;
};

// Names lists that a transport has prepared; never reused. 0: none.
using ListsId = std::uint64_t;

// What one handle carries, on each side in one memory kind and device: runs, or blocks of prepared
// lists. Spans are borrowed for the call only.
struct CopyBatch {
  MemoryKind local_kind = MemoryKind::kHost;
  std::uint32_t local_device = 0;
  MemoryKind remote_kind = MemoryKind::kHost;
  std::uint32_t remote_device = 0;
  std::span<const CopyRun> runs;
  // In place of runs: blocks by their index, one to one. Those that follow one another on both
  // sides become one descriptor, which `adjoining` says happens.
  ListsId lists = 0;
  std::span<const std::int32_t> local_blocks;
  std::span<const std::int32_t> remote_blocks;
  bool adjoining = false;
};

}  // namespace kvpush
