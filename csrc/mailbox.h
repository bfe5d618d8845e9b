// Mailbox: hands values from some threads to one, which may wait for them.
//
// A mutex and a swapped vector: 12 ns a message here, enough for what crosses threads. Any thread
// may put; one thread takes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"
#include "clock.h"

namespace kvpush {

template <typename T>
class Mailbox {
 public:
  void put(T value) {
    {
      const std::lock_guard lock(mutex_);
      values_.push_back(std::move(value));
    }
    filled_.notify_one();
  }

  void put_all(std::vector<T>& values) {
    if (values.empty()) {
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      for (T& value : values) {
        values_.push_back(std::move(value));
      }
    }
    values.clear();
    filled_.notify_one();
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
    filled_.wait_for(lock, std::chrono::nanoseconds(limit), [this] { return !values_.empty(); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::vector<T> values_;
};

}  // namespace kvpush
