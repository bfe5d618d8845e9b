// The only place that reads time.
//
// Times are nanoseconds of the machine's monotonic clock: comparable within a process only, never
// sent to a peer. Any thread.
#pragma once

#include <cstdint>

namespace kvpush {

using TimeNs = std::int64_t;      // a point on the monotonic clock
using DurationNs = std::int64_t;  // a length of time

constexpr DurationNs kMicrosecond = 1'000;
constexpr DurationNs kMillisecond = 1'000 * kMicrosecond;
constexpr DurationNs kSecond = 1'000 * kMillisecond;

TimeNs monotonic_now() noexcept;

// Where the engine gets its time: the monotonic clock, or the simulator's.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimeNs now() const noexcept = 0;
};

class MonotonicClock final : public Clock {
 public:
  TimeNs now() const noexcept override { return monotonic_now(); }
};

}  // namespace kvpush
