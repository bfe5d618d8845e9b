// Virtual time: what is to happen, in order. Events of one time run in the order they were made.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "clock.h"

namespace kvpush::sim {

class EventQueue {
 public:
  using Event = std::function<void()>;

  TimeNs now() const noexcept { return now_; }
  bool empty() const noexcept { return queue_.empty(); }

  void after(DurationNs delay, Event event) {
    queue_.push({now_ + (delay < 0 ? 0 : delay), next_++, std::move(event)});
  }
  // Runs the next event, and moves time to it. False if there is none up to `limit`.
  bool run_next(TimeNs limit) {
    if (queue_.empty() || queue_.top().time > limit) {
      return false;
    }
    // The queue hands out its top as const only to protect its order, which pop() ends.
    Event event = std::move(const_cast<Entry&>(queue_.top()).event);  // NOLINT
    now_ = queue_.top().time;
    queue_.pop();
    event();
    return true;
  }
  void run_until(TimeNs limit) {
    while (run_next(limit)) {
    }
    now_ = limit;
  }

 private:
  struct Entry {
    TimeNs time = 0;
    std::uint64_t order = 0;
    Event event;
    bool operator<(const Entry& other) const noexcept {  // the top is the largest
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  std::priority_queue<Entry> queue_;
  TimeNs now_ = kSecond;  // not 0: code that takes 0 for "never" must not pass by luck
  std::uint64_t next_ = 0;
};

// A machine's clock: it starts somewhere and runs at a rate of its own.
class SimClock final : public Clock {
 public:
  SimClock(const EventQueue& queue, DurationNs offset, std::int64_t rate_ppm)
      : queue_(queue), offset_(offset), rate_ppm_(rate_ppm) {}
  TimeNs now() const noexcept override {
    return offset_ + queue_.now() + queue_.now() / 1'000'000 * rate_ppm_;
  }

 private:
  const EventQueue& queue_;
  DurationNs offset_;
  std::int64_t rate_ppm_;
};

}  // namespace kvpush::sim
