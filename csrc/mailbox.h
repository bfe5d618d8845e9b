// Mailbox: hands values from some threads to one, which may wait for them.
//
// A mutex and a swapped vector: 12 ns a message here, enough for what crosses threads. Any thread
// may put; one thread takes. Who puts pays for waking that one only where it sleeps deeply: a wake
// costs microseconds, and on a full machine the core.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "clock.h"

namespace kvpush {

template <typename T>
class Mailbox {
 public:
  void put(T value) {
    bool asleep = false;
    {
      const std::lock_guard lock(mutex_);
      values_.push_back(std::move(value));
      asleep = std::exchange(asleep_, false);  // one wake is enough
    }
    if (asleep) {
      filled_.notify_one();
    }
  }

  void put_all(std::vector<T>& values) {
    if (values.empty()) {
      return;
    }
    bool asleep = false;
    {
      const std::lock_guard lock(mutex_);
      for (T& value : values) {
        values_.push_back(std::move(value));
      }
      asleep = std::exchange(asleep_, false);  // one wake is enough
    }
    values.clear();
    if (asleep) {
      filled_.notify_one();
    }
  }

  // Swaps what has come into `out`, which must be empty; its capacity is reused.
  void take(std::vector<T>& out) {
    KVPUSH_CHECK(out.empty(), "what is in the vector would be handed out again");
    const std::lock_guard lock(mutex_);
    values_.swap(out);
  }

  // Returns when something has come, or after `limit`.
  void wait(DurationNs limit) {
    std::unique_lock lock(mutex_);
    asleep_ = true;
    filled_.wait_for(lock, std::chrono::nanoseconds(limit), [this] { return !values_.empty(); });
    asleep_ = false;
  }
  // Returns after `limit`, or at once if something is there; what comes meanwhile wakes nobody.
  void nap(DurationNs limit) {
    {
      const std::lock_guard lock(mutex_);
      if (!values_.empty()) {
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(limit));
  }

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::vector<T> values_;
  bool asleep_ = false;
};

}  // namespace kvpush
