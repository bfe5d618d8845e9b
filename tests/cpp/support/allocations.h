// Counts what a thread allocates, so that a test or a benchmark can say "nothing". It replaces the
// program's operators new and delete: included by one source file of an executable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

// The sanitizers bring their own operators, which ours must not be mixed with.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCountsAllocations = false;
#else
constexpr bool kCountsAllocations = true;
#endif

namespace {
thread_local std::uint64_t allocations = 0;
thread_local std::uint64_t allocated_bytes = 0;
}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Not inlined: seen through, malloc and free look to the compiler like a mismatch of new and
// delete.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  allocated_bytes += size;
  void* memory = std::malloc(std::max<std::size_t>(size, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
#endif
