#include "clock.h"

#include <chrono>

namespace kvpush {

TimeNs monotonic_now() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace kvpush
