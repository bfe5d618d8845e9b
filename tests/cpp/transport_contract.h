// The contract of Transport, as tests that run on every implementation.
//
// To run it on one, write a type with
//   static std::string skip_reason();  // not empty: why it cannot run here
//   Transport& first();  Transport& second();   // two ends, in one process, not yet introduced
//   void progress();                            // lets time pass, if the ends don't see to it
// and instantiate: INSTANTIATE_TYPED_TEST_SUITE_P(Name, TransportContract, Type);
//
// Both ends are driven alternately by one thread. Nothing waits without a limit.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "transport.h"

namespace kvpush {

inline Bytes to_bytes(std::string_view text) {
  Bytes bytes;
  for (const char c : text)
    bytes.push_back(static_cast<std::byte>(c));
  return bytes;
}

// Bytes that differ at every place and for every seed, cheaply.
inline std::byte pattern_byte(std::size_t position, std::uint32_t seed) {
  const std::uint64_t mixed = (position + 1) * 0x9E3779B97F4A7C15U + seed * 0xD1B54A32D192ED03U;
  return static_cast<std::byte>(mixed >> 56U);
}

inline Bytes pattern(std::size_t size, std::uint32_t seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = pattern_byte(i, seed);
  return bytes;
}

// One end: a transport, memory registered with it, and what has arrived.
struct TransportEnd {
  static constexpr std::size_t kMemoryBytes = std::size_t{8} << 20U;

  Transport* transport = nullptr;
  Bytes memory = Bytes(kMemoryBytes);
  std::vector<Notification> inbox;

  std::uint64_t address(std::size_t offset = 0) const {
    return reinterpret_cast<std::uint64_t>(memory.data()) + offset;
  }
  void fill(std::uint32_t seed) { memory = pattern_into(std::move(memory), seed); }
  bool holds(std::size_t offset, std::size_t size, const TransportEnd& other,
             std::size_t other_offset) const {
    const auto begin = memory.begin() + static_cast<std::ptrdiff_t>(offset);
    return std::equal(begin, begin + static_cast<std::ptrdiff_t>(size),
                      other.memory.begin() + static_cast<std::ptrdiff_t>(other_offset));
  }

 private:
  // Fills in place: the memory's address is registered and must not move.
  static Bytes pattern_into(Bytes bytes, std::uint32_t seed) {
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = pattern_byte(i, seed);
    return bytes;
  }
};

template <typename Pair>
class TransportContract : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = Pair::skip_reason(); !reason.empty()) GTEST_SKIP() << reason;
    pair_ = std::make_unique<Pair>();
    a.transport = &pair_->first();
    b.transport = &pair_->second();
    for (TransportEnd* end : {&a, &b}) {
      const MemoryRange range{end->address(), TransportEnd::kMemoryBytes, MemoryKind::kHost, 0};
      const Status status = end->transport->register_memory({&range, 1});
      ASSERT_TRUE(status.is_ok()) << status.message();
    }
    a.fill(1);
    b.fill(2);
  }

  void TearDown() override {
    if (pair_ == nullptr) return;
    for (TransportEnd* end : {&a, &b}) {
      EXPECT_EQ(end->transport->counts().handles, 0U) << "every handle must be released";
      end->transport->remove_peer(a.transport->local_name());
      end->transport->remove_peer(b.transport->local_name());
      EXPECT_EQ(end->transport->counts().peers, 0U);
    }
  }

  static Bytes metadata_of(TransportEnd& end) {
    Result<Bytes> metadata = end.transport->local_metadata();
    EXPECT_TRUE(metadata.is_ok()) << metadata.message();
    return metadata.is_ok() ? metadata.value() : Bytes{};
  }

  // `from` learns to reach `to`.
  static void meet(TransportEnd& from, TransportEnd& to) {
    const Result<std::string> name = from.transport->add_peer(metadata_of(to));
    ASSERT_TRUE(name.is_ok()) << name.message();
    EXPECT_EQ(name.value(), to.transport->local_name());
  }
  void meet_both() {
    meet(a, b);
    meet(b, a);
  }

  static CopyBatch batch_of(const std::vector<CopyRun>& runs) {
    CopyBatch batch;
    batch.runs = runs;
    return batch;
  }

  static HandleId post(TransportEnd& from, TransportEnd& to, CopyDirection direction,
                       const std::vector<CopyRun>& runs, std::string_view payload = {}) {
    const Result<HandleId> handle = from.transport->post(direction, to.transport->local_name(),
                                                         batch_of(runs), to_bytes(payload));
    EXPECT_TRUE(handle.is_ok()) << handle.message();
    return handle.is_ok() ? handle.value() : 0;
  }
  static HandleId write(TransportEnd& from, TransportEnd& to, const std::vector<CopyRun>& runs,
                        std::string_view payload = {}) {
    return post(from, to, CopyDirection::kWrite, runs, payload);
  }

  // Two bases of 1,000 blocks a side, with gaps; the sides differ in stride. Not the memory's
  // start.
  static constexpr std::uint32_t kListed = 1'000;
  static constexpr std::uint64_t kListedBytes = 384;
  static BlockGrid grid_of(const TransportEnd& local, const TransportEnd& remote,
                           std::uint64_t stride = 400) {
    BlockGrid grid;
    grid.block_bytes = kListedBytes;
    grid.local = {
        MemoryKind::kHost, 0, stride, kListed, {local.address(64), local.address(2U << 20U)}};
    grid.remote = {
        MemoryKind::kHost, 0, 1024, kListed, {remote.address(3U << 20U), remote.address(128)}};
    return grid;
  }
  static Result<HandleId> post_listed(TransportEnd& from, const TransportEnd& to, ListsId lists,
                                      const std::vector<std::int32_t>& local,
                                      const std::vector<std::int32_t>& remote,
                                      std::string_view payload = {},
                                      CopyDirection direction = CopyDirection::kWrite,
                                      bool adjoining = false) {
    CopyBatch batch;
    batch.lists = lists;
    batch.local_blocks = local;
    batch.remote_blocks = remote;
    batch.adjoining = adjoining;
    return from.transport->post(direction, to.transport->local_name(), batch, to_bytes(payload));
  }
  ListsId prepare(TransportEnd& from, const TransportEnd& to, const BlockGrid& grid) {
    const Result<ListsId> lists = from.transport->prepare_lists(to.transport->local_name(), grid);
    EXPECT_TRUE(lists.is_ok()) << lists.message();
    return lists.is_ok() ? lists.value() : 0;
  }

  // Drives both ends until `done` holds; false after a limit that only a hang reaches.
  bool drive_until(const std::function<bool()>& done) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!done()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      for (TransportEnd* end : {&a, &b}) {
        const Status status = end->transport->poll_notifications(end->inbox);
        EXPECT_TRUE(status.is_ok()) << status.message();
      }
      pair_->progress();
    }
    return true;
  }

  // Drives until the handle has ended, releases it, and says how it ended.
  HandleState finish(TransportEnd& owner, HandleId handle) {
    HandleState state = HandleState::kInProgress;
    const bool ended = drive_until([&] {
      state = owner.transport->poll(handle);
      return state != HandleState::kInProgress;
    });
    EXPECT_TRUE(ended) << "the handle never ended";
    if (ended) owner.transport->release(handle);
    return state;
  }

  static bool has_arrived(const TransportEnd& end, std::string_view payload) {
    const Bytes wanted = to_bytes(payload);
    return std::any_of(end.inbox.begin(), end.inbox.end(),
                       [&wanted](const Notification& each) { return each.payload == wanted; });
  }

  // One write and its notification; `payload` must differ from what was sent before.
  void expect_working(TransportEnd& from, TransportEnd& to, std::string_view payload) {
    ASSERT_FALSE(has_arrived(to, payload));
    const HandleId handle =
        write(from, to, {{from.address(4096), to.address(8192), 65536}}, payload);
    EXPECT_EQ(finish(from, handle), HandleState::kDone);
    ASSERT_TRUE(drive_until([&] { return has_arrived(to, payload); }));
    EXPECT_TRUE(to.holds(8192, 65536, from, 4096));
  }

  TransportEnd a;
  TransportEnd b;
  std::unique_ptr<Pair> pair_;  // after the memory: goes first
};

TYPED_TEST_SUITE_P(TransportContract);

TYPED_TEST_P(TransportContract, PeersLearnEachOthersNames) {
  EXPECT_NE(this->a.transport->local_name(), this->b.transport->local_name());
  EXPECT_EQ(this->a.transport->counts().peers, 0U);
  this->meet_both();
  EXPECT_EQ(this->a.transport->counts().peers, 1U);
  EXPECT_EQ(this->b.transport->counts().peers, 1U);
}

TYPED_TEST_P(TransportContract, OwnMetadataIsRefused) {
  EXPECT_FALSE(this->a.transport->add_peer(this->metadata_of(this->a)).is_ok());
  EXPECT_EQ(this->a.transport->counts().peers, 0U);
}

TYPED_TEST_P(TransportContract, NotificationOfAWriteComesAfterItsBytes) {
  this->meet_both();
  const HandleId handle = this->write(
      this->a, this->b, {{this->a.address(100), this->b.address(5000), 3'000'000}}, "written");
  HandleState state = HandleState::kInProgress;
  ASSERT_TRUE(this->drive_until([&] {
    if (state == HandleState::kInProgress) state = this->a.transport->poll(handle);
    return !this->b.inbox.empty();
  }));
  EXPECT_TRUE(this->b.holds(5000, 3'000'000, this->a, 100));
  EXPECT_EQ(this->b.inbox.front().payload, to_bytes("written"));
  EXPECT_EQ(this->b.inbox.front().peer_name, this->a.transport->local_name());
  EXPECT_EQ(this->finish(this->a, handle), HandleState::kDone);
  EXPECT_EQ(this->b.inbox.size(), 1U);
}

TYPED_TEST_P(TransportContract, WriteTouchesNothingElse) {
  this->meet_both();
  const Bytes before = this->b.memory;
  const HandleId handle =
      this->write(this->a, this->b, {{this->a.address(0), this->b.address(1001), 4097}}, "x");
  EXPECT_EQ(this->finish(this->a, handle), HandleState::kDone);
  ASSERT_TRUE(this->drive_until([&] { return !this->b.inbox.empty(); }));
  Bytes expected = before;
  std::copy_n(this->a.memory.begin(), 4097, expected.begin() + 1001);
  EXPECT_TRUE(this->b.memory == expected);
}

TYPED_TEST_P(TransportContract, ReadBringsBytesAndTellsTheirOwner) {
  this->meet_both();
  const HandleId handle =
      this->post(this->a, this->b, CopyDirection::kRead,
                 {{this->a.address(0), this->b.address(2'000'000), 1'000'000}}, "read");
  EXPECT_EQ(this->finish(this->a, handle), HandleState::kDone);
  EXPECT_TRUE(this->a.holds(0, 1'000'000, this->b, 2'000'000));
  ASSERT_TRUE(this->drive_until([&] { return !this->b.inbox.empty(); }));
  EXPECT_EQ(this->b.inbox.front().payload, to_bytes("read"));
}

TYPED_TEST_P(TransportContract, WithoutPayloadNothingIsNotified) {
  this->meet_both();
  const HandleId silent =
      this->write(this->a, this->b, {{this->a.address(), this->b.address(), 1000}});
  EXPECT_EQ(this->finish(this->a, silent), HandleState::kDone);
  // What is sent later arrives, so what was not sent before would have.
  ASSERT_TRUE(
      this->a.transport->notify(this->b.transport->local_name(), to_bytes("later")).is_ok());
  ASSERT_TRUE(this->drive_until([&] { return !this->b.inbox.empty(); }));
  EXPECT_EQ(this->b.inbox.front().payload, to_bytes("later"));
  EXPECT_TRUE(this->b.holds(0, 1000, this->a, 0));
}

TYPED_TEST_P(TransportContract, OneHandleCarriesManyScatteredRuns) {
  constexpr std::size_t kRuns = 20'000;
  constexpr std::size_t kStep = 400;
  constexpr std::size_t kLength = 384;  // gaps on both sides: nothing can be merged
  this->meet_both();
  std::vector<CopyRun> runs;
  for (std::size_t i = 0; i < kRuns; ++i) {
    runs.push_back({this->a.address(i * kStep), this->b.address((kRuns - 1 - i) * kStep), kLength});
  }
  EXPECT_EQ(this->finish(this->a, this->write(this->a, this->b, runs, "many")), HandleState::kDone);
  ASSERT_TRUE(this->drive_until([&] { return !this->b.inbox.empty(); }));
  for (std::size_t i = 0; i < kRuns; ++i) {
    ASSERT_TRUE(this->b.holds((kRuns - 1 - i) * kStep, kLength, this->a, i * kStep)) << "run " << i;
  }
}

TYPED_TEST_P(TransportContract, ListedBlocksAreCopiedOneToOneAndNothingElse) {
  this->meet_both();
  const BlockGrid grid = this->grid_of(this->a, this->b);
  const ListsId lists = this->prepare(this->a, this->b, grid);
  EXPECT_NE(lists, 0U);
  EXPECT_EQ(this->a.transport->counts().lists, 1U);
  std::vector<std::int32_t> from;
  std::vector<std::int32_t> to;
  Bytes expected = this->b.memory;
  for (std::int32_t i = 0; i < 2'000; i += 3) {
    from.push_back(i);
    to.push_back((i * 7 + 1'999) % 2'000);
    const std::uint64_t source =
        grid.local.address(static_cast<std::uint64_t>(from.back())) - this->a.address();
    const std::uint64_t sink =
        grid.remote.address(static_cast<std::uint64_t>(to.back())) - this->b.address();
    std::copy_n(this->a.memory.begin() + static_cast<std::ptrdiff_t>(source), this->kListedBytes,
                expected.begin() + static_cast<std::ptrdiff_t>(sink));
  }
  const Result<HandleId> handle = this->post_listed(this->a, this->b, lists, from, to, "listed");
  ASSERT_TRUE(handle.is_ok()) << handle.message();
  EXPECT_EQ(this->finish(this->a, handle.value()), HandleState::kDone);
  ASSERT_TRUE(this->drive_until([&] { return !this->b.inbox.empty(); }));
  EXPECT_EQ(this->b.inbox.front().payload, to_bytes("listed"));
  EXPECT_TRUE(this->b.memory == expected);
}

TYPED_TEST_P(TransportContract, ListedBlocksThatAdjoinAreCopiedToo) {
  this->meet_both();
  BlockGrid grid = this->grid_of(this->a, this->b);
  grid.local.stride = grid.remote.stride = this->kListedBytes;
  const ListsId lists = this->prepare(this->a, this->b, grid);
  // Across the end of a base, where the indices go on and the memory does not; up and down again.
  const std::vector<std::int32_t> from{997, 998, 999, 1'000, 1'001, 5, 4, 3, 10, 11};
  const std::vector<std::int32_t> to{0, 1, 2, 3, 4, 1'503, 1'502, 1'501, 998, 999};
  const Result<HandleId> handle = this->post_listed(this->a, this->b, lists, from, to, "adjoining",
                                                    CopyDirection::kWrite, true);
  ASSERT_TRUE(handle.is_ok()) << handle.message();
  EXPECT_EQ(this->finish(this->a, handle.value()), HandleState::kDone);
  ASSERT_TRUE(this->drive_until([&] { return !this->b.inbox.empty(); }));
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto source = static_cast<std::uint64_t>(from[i]);
    const auto sink = static_cast<std::uint64_t>(to[i]);
    EXPECT_TRUE(this->b.holds(grid.remote.address(sink) - this->b.address(), this->kListedBytes,
                              this->a, grid.local.address(source) - this->a.address()))
        << "block " << i;
  }
}

TYPED_TEST_P(TransportContract, ListedBlocksAreReadToo) {
  this->meet_both();
  const BlockGrid grid = this->grid_of(this->a, this->b);
  const ListsId lists = this->prepare(this->a, this->b, grid);
  const Result<HandleId> handle =
      this->post_listed(this->a, this->b, lists, {3, 1'500}, {1'999, 0}, {}, CopyDirection::kRead);
  ASSERT_TRUE(handle.is_ok()) << handle.message();
  EXPECT_EQ(this->finish(this->a, handle.value()), HandleState::kDone);
  EXPECT_TRUE(this->a.holds(grid.local.address(3) - this->a.address(), this->kListedBytes, this->b,
                            grid.remote.address(1'999) - this->b.address()));
  EXPECT_TRUE(this->a.holds(grid.local.address(1'500) - this->a.address(), this->kListedBytes,
                            this->b, grid.remote.address(0) - this->b.address()));
}

TYPED_TEST_P(TransportContract, BadListsAndIndicesAreErrorsAndHarmNothing) {
  this->meet_both();
  const BlockGrid grid = this->grid_of(this->a, this->b);
  const ListsId lists = this->prepare(this->a, this->b, grid);
  const auto refused = [&](ListsId of, const std::vector<std::int32_t>& from,
                           const std::vector<std::int32_t>& to) {
    return !this->post_listed(this->a, this->b, of, from, to).is_ok();
  };
  EXPECT_TRUE(refused(lists + 1, {0}, {0}));
  EXPECT_TRUE(refused(lists, {}, {}));
  EXPECT_TRUE(refused(lists, {0, 1}, {0}));
  EXPECT_TRUE(refused(lists, {2'000}, {0}));
  EXPECT_TRUE(refused(lists, {0}, {2'000}));
  EXPECT_TRUE(refused(lists, {-1}, {0}));
  EXPECT_TRUE(refused(lists, {0}, {-1}));
  EXPECT_EQ(this->a.transport->counts().handles, 0U);
  const Result<HandleId> handle = this->post_listed(this->a, this->b, lists, {0}, {0});
  ASSERT_TRUE(handle.is_ok()) << handle.message();
  EXPECT_EQ(this->finish(this->a, handle.value()), HandleState::kDone);
  this->expect_working(this->a, this->b, "still works");
}

TYPED_TEST_P(TransportContract, ListsGoWithTheirPeer) {
  this->meet_both();
  const BlockGrid grid = this->grid_of(this->a, this->b);
  const ListsId first = this->prepare(this->a, this->b, grid);
  const ListsId second = this->prepare(this->a, this->b, grid);
  EXPECT_NE(first, second);
  EXPECT_EQ(this->a.transport->counts().lists, 2U);
  this->a.transport->remove_peer(this->b.transport->local_name());
  EXPECT_EQ(this->a.transport->counts().lists, 0U);
  EXPECT_FALSE(this->a.transport->prepare_lists(this->b.transport->local_name(), grid).is_ok());
  this->meet(this->a, this->b);
  EXPECT_FALSE(this->post_listed(this->a, this->b, first, {0}, {0}).is_ok());
  const ListsId third = this->prepare(this->a, this->b, grid);
  EXPECT_NE(third, first);
  EXPECT_NE(third, second);
  const Result<HandleId> handle = this->post_listed(this->a, this->b, third, {0}, {0});
  ASSERT_TRUE(handle.is_ok()) << handle.message();
  EXPECT_EQ(this->finish(this->a, handle.value()), HandleState::kDone);
}

TYPED_TEST_P(TransportContract, SeveralHandlesAreInFlightInBothDirections) {
  constexpr std::size_t kHandles = 16;
  constexpr std::size_t kBytes = 100'000;
  constexpr std::size_t kHalf = TransportEnd::kMemoryBytes / 2;
  this->meet_both();
  struct Open {
    TransportEnd* owner;
    HandleId handle;
  };
  std::vector<Open> open;
  for (std::size_t i = 0; i < kHandles; ++i) {
    const std::string payload = "handle " + std::to_string(i);
    const std::size_t at = i * kBytes;
    open.push_back(
        {&this->a, this->write(this->a, this->b,
                               {{this->a.address(at), this->b.address(at), kBytes}}, payload)});
    open.push_back(
        {&this->b, this->write(this->b, this->a,
                               {{this->b.address(kHalf + at), this->a.address(kHalf + at), kBytes}},
                               payload)});
  }
  EXPECT_EQ(this->a.transport->counts().handles, kHandles);
  // Released in the opposite order of posting.
  std::reverse(open.begin(), open.end());
  for (const Open& each : open)
    EXPECT_EQ(this->finish(*each.owner, each.handle), HandleState::kDone);
  ASSERT_TRUE(this->drive_until(
      [&] { return this->a.inbox.size() >= kHandles && this->b.inbox.size() >= kHandles; }));
  EXPECT_EQ(this->a.inbox.size(), kHandles);
  EXPECT_EQ(this->b.inbox.size(), kHandles);
  EXPECT_TRUE(this->b.holds(0, kHandles * kBytes, this->a, 0));
  EXPECT_TRUE(this->a.holds(kHalf, kHandles * kBytes, this->b, kHalf));
}

TYPED_TEST_P(TransportContract, NotificationsOfAnySizeArriveWholeAndInOrder) {
  this->meet_both();
  std::vector<Bytes> sent;
  for (const std::size_t size : {1UL, 100UL, 8'191UL, 8'193UL, 70'000UL, 2UL << 20U, 3UL}) {
    sent.push_back(pattern(size, static_cast<std::uint32_t>(size)));
    const Status status = this->a.transport->notify(this->b.transport->local_name(), sent.back());
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
  ASSERT_TRUE(this->drive_until([&] { return this->b.inbox.size() >= sent.size(); }));
  ASSERT_EQ(this->b.inbox.size(), sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) {
    EXPECT_TRUE(this->b.inbox[i].payload == sent[i]) << "notification " << i;
    EXPECT_EQ(this->b.inbox[i].peer_name, this->a.transport->local_name());
  }
}

TYPED_TEST_P(TransportContract, LargeNotificationRidesOnAWrite) {
  this->meet_both();
  const std::string payload(2U << 20U, 'p');
  const HandleId handle =
      this->write(this->a, this->b, {{this->a.address(), this->b.address(), 4096}}, payload);
  EXPECT_EQ(this->finish(this->a, handle), HandleState::kDone);
  ASSERT_TRUE(this->drive_until([&] { return !this->b.inbox.empty(); }));
  EXPECT_TRUE(this->b.inbox.front().payload == to_bytes(payload));
}

TYPED_TEST_P(TransportContract, UnknownPeersAreErrors) {
  const std::vector<CopyRun> runs = {{this->a.address(), this->b.address(), 1000}};
  const std::string& stranger = this->b.transport->local_name();
  EXPECT_FALSE(this->a.transport->notify(stranger, to_bytes("x")).is_ok());
  EXPECT_FALSE(this->a.transport->notify("", to_bytes("x")).is_ok());
  const Result<HandleId> handle =
      this->a.transport->post(CopyDirection::kWrite, stranger, this->batch_of(runs), to_bytes("x"));
  EXPECT_FALSE(handle.is_ok());
  EXPECT_NE(handle.message().find(stranger), std::string::npos) << handle.message();
  this->a.transport->remove_peer(stranger);
  this->a.transport->remove_peer("nobody");
  EXPECT_EQ(this->a.transport->counts().peers, 0U);
}

TYPED_TEST_P(TransportContract, BadBatchesAreErrorsAndHarmNothing) {
  this->meet_both();
  const std::string& peer = this->b.transport->local_name();
  const auto refused = [&](const std::vector<CopyRun>& runs) {
    return !this->a.transport->post(CopyDirection::kWrite, peer, this->batch_of(runs), {}).is_ok();
  };
  const Bytes unregistered(1000);
  const auto outside = reinterpret_cast<std::uint64_t>(unregistered.data());
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(refused({{this->a.address(), this->b.address(), 0}}));
  EXPECT_TRUE(refused({{outside, this->b.address(), 1000}}));
  EXPECT_TRUE(refused({{this->a.address(), outside, 1000}}));
  EXPECT_TRUE(refused({{this->a.address(1), this->b.address(), TransportEnd::kMemoryBytes}}));
  EXPECT_TRUE(refused({{this->a.address(), this->b.address(1), TransportEnd::kMemoryBytes}}));
  EXPECT_EQ(this->a.transport->counts().handles, 0U);
  EXPECT_EQ(this->a.transport->counts().peers, 1U);
  this->expect_working(this->a, this->b, "still works");
}

TYPED_TEST_P(TransportContract, BadRangesAreRefusedByName) {
  const MemoryRange empty{this->a.address(), 0, MemoryKind::kHost, 0};
  EXPECT_FALSE(this->a.transport->register_memory({&empty, 1}).is_ok());
  const MemoryRange wrapping{~std::uint64_t{0} - 10, 100, MemoryKind::kHost, 0};
  const Status status = this->a.transport->register_memory({&wrapping, 1});
  EXPECT_NE(status.message().find("0xfffffffffffffff5"), std::string::npos) << status.message();
}

TYPED_TEST_P(TransportContract, WhatIsNotMetadataIsAnError) {
  const Bytes good = this->metadata_of(this->b);
  EXPECT_FALSE(this->a.transport->add_peer({}).is_ok());
  EXPECT_FALSE(this->a.transport->add_peer(to_bytes("metadata")).is_ok());
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    EXPECT_FALSE(this->a.transport->add_peer(pattern(seed * 7, seed)).is_ok());
  }
  for (std::size_t size = 0; size < good.size(); size += 1 + good.size() / 97) {
    EXPECT_FALSE(this->a.transport->add_peer(BytesView(good).first(size)).is_ok()) << size;
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(this->a.transport->add_peer(longer).is_ok());
  EXPECT_EQ(this->a.transport->counts().peers, 0U);
  this->meet_both();
  this->expect_working(this->a, this->b, "good metadata");
}

TYPED_TEST_P(TransportContract, RemovedPeerGetsNothingUntilAddedAgain) {
  this->meet_both();
  this->expect_working(this->a, this->b, "before");
  const std::string& peer = this->b.transport->local_name();
  this->a.transport->remove_peer(peer);
  EXPECT_EQ(this->a.transport->counts().peers, 0U);
  const std::vector<CopyRun> runs = {{this->a.address(), this->b.address(), 1000}};
  EXPECT_FALSE(
      this->a.transport->post(CopyDirection::kWrite, peer, this->batch_of(runs), {}).is_ok());
  EXPECT_FALSE(this->a.transport->notify(peer, to_bytes("x")).is_ok());
  EXPECT_EQ(this->a.transport->counts().handles, 0U);

  this->meet(this->a, this->b);
  EXPECT_EQ(this->a.transport->counts().peers, 1U);
  this->expect_working(this->a, this->b, "after");
}

TYPED_TEST_P(TransportContract, AddingAPeerAgainReplacesIt) {
  this->meet_both();
  for (int i = 0; i < 20; ++i) {
    this->meet(this->a, this->b);
    EXPECT_EQ(this->a.transport->counts().peers, 1U);
    this->expect_working(this->a, this->b, "again " + std::to_string(i));
  }
}

TYPED_TEST_P(TransportContract, HandlesOfARemovedPeerEndAndAreReleased) {
  this->meet_both();
  const std::size_t half = TransportEnd::kMemoryBytes / 2;
  std::vector<HandleId> handles;
  for (int i = 0; i < 8; ++i) {
    handles.push_back(
        this->write(this->a, this->b, {{this->a.address(), this->b.address(half), half}}, "gone"));
  }
  this->a.transport->remove_peer(this->b.transport->local_name());
  for (const HandleId handle : handles) {
    EXPECT_NE(this->finish(this->a, handle), HandleState::kInProgress);
  }
  EXPECT_EQ(this->a.transport->counts().handles, 0U);
  EXPECT_EQ(this->a.transport->counts().peers, 0U);
  this->meet(this->a, this->b);
  this->expect_working(this->a, this->b, "met again");
}

TYPED_TEST_P(TransportContract, EndedHandleKeepsItsStateUntilReleased) {
  this->meet_both();
  const HandleId handle =
      this->write(this->a, this->b, {{this->a.address(), this->b.address(), 1000}}, "x");
  ASSERT_TRUE(this->drive_until(
      [&] { return this->a.transport->poll(handle) != HandleState::kInProgress; }));
  this->a.transport->remove_peer(this->b.transport->local_name());
  EXPECT_EQ(this->a.transport->poll(handle), HandleState::kDone);
  EXPECT_EQ(this->a.transport->counts().handles, 1U);
  this->a.transport->release(handle);
  EXPECT_EQ(this->a.transport->counts().handles, 0U);
}

REGISTER_TYPED_TEST_SUITE_P(TransportContract, PeersLearnEachOthersNames, OwnMetadataIsRefused,
                            NotificationOfAWriteComesAfterItsBytes, WriteTouchesNothingElse,
                            ReadBringsBytesAndTellsTheirOwner, WithoutPayloadNothingIsNotified,
                            OneHandleCarriesManyScatteredRuns,
                            ListedBlocksAreCopiedOneToOneAndNothingElse,
                            ListedBlocksThatAdjoinAreCopiedToo, ListedBlocksAreReadToo,
                            BadListsAndIndicesAreErrorsAndHarmNothing, ListsGoWithTheirPeer,
                            SeveralHandlesAreInFlightInBothDirections,
                            NotificationsOfAnySizeArriveWholeAndInOrder,
                            LargeNotificationRidesOnAWrite, UnknownPeersAreErrors,
                            BadBatchesAreErrorsAndHarmNothing, BadRangesAreRefusedByName,
                            WhatIsNotMetadataIsAnError, RemovedPeerGetsNothingUntilAddedAgain,
                            AddingAPeerAgainReplacesIt, HandlesOfARemovedPeerEndAndAreReleased,
                            EndedHandleKeepsItsStateUntilReleased);

}  // namespace kvpush
