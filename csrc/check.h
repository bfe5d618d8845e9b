// KVPUSH_CHECK: an assertion that stays on in production.
//
// It guards against our own mistakes only. A peer's faults are values (status.h), counted and
// dropped; they must never reach a check. Any thread may use it.
#pragma once

namespace kvpush {

// Prints the failed condition with its place to stderr and aborts the process.
[[noreturn]] void check_failed(const char* condition, const char* file, int line,
                               const char* why) noexcept;

}  // namespace kvpush

#define KVPUSH_CHECK(condition, why)                                 \
  do {                                                               \
    if (!(condition)) [[unlikely]] {                                 \
      ::kvpush::check_failed(#condition, __FILE__, __LINE__, (why)); \
    }                                                                \
  } while (false)
