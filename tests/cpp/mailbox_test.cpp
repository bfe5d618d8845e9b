#include "mailbox.h"

#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace kvpush {
namespace {

TEST(Mailbox, EachValueOfEachThreadArrivesOnceAndInItsOrder) {
  constexpr int kThreads = 4;
  constexpr int kValues = 10'000;
  Mailbox<int> box;
  std::vector<std::thread> senders;
  for (int t = 0; t < kThreads; ++t) {
    senders.emplace_back([&box, t] {
      for (int i = 0; i < kValues; ++i) {
        if (i % 2 == 0) {
          box.put(t * kValues + i);
        } else {
          std::vector<int> one{t * kValues + i};
          box.put_all(one);
        }
      }
    });
  }
  std::vector<int> next(kThreads, 0);
  int received = 0;
  while (received < kThreads * kValues) {
    std::vector<int> values;
    box.wait(kSecond);
    box.take(values);
    for (const int value : values) {
      EXPECT_EQ(value % kValues, next[static_cast<std::size_t>(value / kValues)]++);
      ++received;
    }
  }
  for (std::thread& sender : senders) {
    sender.join();
  }
}

TEST(Mailbox, WaitReturnsWithoutAValueToo) {
  Mailbox<int> box;
  box.wait(kMillisecond);
  std::vector<int> values;
  box.take(values);
  EXPECT_TRUE(values.empty());
}

}  // namespace
}  // namespace kvpush
