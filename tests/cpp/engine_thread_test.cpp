// The native thread: its start, its stop, and who waits for it. Two threads, each with its own
// transport, over a link that is no more than two locked inboxes and memcpy.
#include "engine_thread.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sched.h>
#include <string>
#include <unistd.h>

#include <gtest/gtest.h>

#include "support/script.h"
#include "support/tiny_regions.h"

namespace kvpush {
namespace {

constexpr DurationNs kLimit = 60 * kSecond;

// What joins the transports of one test. Any thread.
class Link {
 public:
  void send(const std::string& from, const std::string& to, BytesView payload) {
    const std::lock_guard lock(mutex_);
    inboxes_[to].push_back({from, Bytes(payload.begin(), payload.end())});
  }
  void take(const std::string& name, std::vector<Notification>& out) {
    const std::lock_guard lock(mutex_);
    for (Notification& notification : inboxes_[name]) {
      out.push_back(std::move(notification));
    }
    inboxes_[name].clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<Notification>> inboxes_;
};

// A WRITE is over when post() returns. Its name is its metadata.
class LinkTransport final : public Transport {
 public:
  LinkTransport(Link& link, std::string name) : link_(link), name_(std::move(name)) {}
  const std::string& local_name() const override { return name_; }
  Result<Bytes> local_metadata() override {
    const auto view = std::as_bytes(std::span<const char>(name_));
    return Bytes(view.begin(), view.end());
  }
  Status register_memory(std::span<const MemoryRange> ranges) override {
    return ranges.empty() ? Status::error("no memory") : Status::ok();
  }
  Result<std::string> add_peer(BytesView metadata) override {
    return std::string(reinterpret_cast<const char*>(metadata.data()), metadata.size());
  }
  void remove_peer(const std::string& /*peer_name*/) override {}
  Status notify(const std::string& peer_name, BytesView payload) override {
    link_.send(name_, peer_name, payload);
    return Status::ok();
  }
  Status poll_notifications(std::vector<Notification>& out) override {
    link_.take(name_, out);
    return Status::ok();
  }
  Result<HandleId> post(CopyDirection /*direction*/, const std::string& peer_name,
                        const CopyBatch& batch, BytesView payload) override {
    for (const CopyRun& run : batch.runs) {
      std::memcpy(reinterpret_cast<void*>(run.remote_address),       // NOLINT
                  reinterpret_cast<const void*>(run.local_address),  // NOLINT
                  run.length);
    }
    link_.send(name_, peer_name, payload);
    return HandleId{1};
  }
  HandleState poll(HandleId /*handle*/) override { return HandleState::kDone; }
  void release(HandleId /*handle*/) override {}
  Counts counts() const override { return {}; }

 private:
  Link& link_;
  std::string name_;
};

struct ThreadRank {
  ThreadRank(Link& link_in, std::string name_in, Session session)
      : link(link_in), name(std::move(name_in)), memory(2 * 8 * tiny_block_bytes(4)) {
    const auto base = reinterpret_cast<std::uint64_t>(memory.data());
    info.session = session;
    info.engine_id = name;
    info.regions = tiny_regions(base, 8, 0, 4, 4);
  }
  Status start() {
    const MemoryRange range{reinterpret_cast<std::uint64_t>(memory.data()), memory.size(),
                            MemoryKind::kHost, 0};
    return thread.start(
        [this]() -> Result<std::unique_ptr<Transport>> {
          return std::unique_ptr<Transport>(std::make_unique<LinkTransport>(link, name));
        },
        make_host_fence(), {range}, info);
  }
  PeerInfo told() const { return decode_peer_info(thread.peer_info()).value(); }
  // Waits for the end of a ticket.
  EndAction wait_for(Ticket ticket) {
    const TimeNs limit = monotonic_now() + kLimit;
    while (monotonic_now() < limit) {
      std::vector<EngineEvent> events;
      thread.poll(events);
      for (EngineEvent& event : events) {
        if (auto* end = std::get_if<EndAction>(&event); end != nullptr && end->ticket == ticket) {
          return *end;
        }
      }
      std::this_thread::yield();
    }
    ADD_FAILURE() << "ticket " << ticket << " has not ended";
    return {};
  }

  Link& link;
  std::string name;
  Bytes memory;
  PeerInfo info;
  EngineThread thread{EngineConfig{}, LoopConfig{}};
};

class EngineThreadTest : public ::testing::Test {
 protected:
  ConnectResult meet() {
    const auto targets = find_targets(std::vector{p.told()}, std::vector{d.told()}, 0);
    return d.thread.connect(targets.value(), kLimit);
  }
  void grant(Ticket ticket, DurationNs wait) {
    GrantCommand command;
    command.ticket = ticket;
    command.attempt = ticket;
    command.key = script::key_of("r" + std::to_string(ticket));
    command.span = {0, 4};
    command.blocks = {GroupBlocks{0, {3}}};
    command.writers = {10};
    command.deadline = monotonic_now() + wait;
    d.thread.submit(std::move(command));
  }
  void offer(Ticket ticket) {
    FencedOfferCommand command;
    command.offer = {
        ticket, script::key_of("r" + std::to_string(ticket)), {GroupBlocks{0, {1}}}, 4, true};
    p.thread.submit(std::move(command));
  }

  Link link;
  ThreadRank p{link, "P", 10};
  ThreadRank d{link, "D", 20};
};

TEST_F(EngineThreadTest, MeetsTransfersAndStops) {
  ASSERT_TRUE(p.start().is_ok());
  ASSERT_TRUE(d.start().is_ok());
  const ConnectResult met = meet();
  ASSERT_TRUE(met.status.is_ok()) << met.status.message();
  for (Ticket ticket = 1; ticket <= 50; ++ticket) {
    offer(ticket);
    grant(ticket, kLimit);
    EXPECT_EQ(d.wait_for(ticket).end, End::kDone);
    EXPECT_EQ(p.wait_for(ticket).end, End::kDone);
  }
  p.thread.shutdown(kLimit);
  d.thread.shutdown(kLimit);
  d.thread.shutdown(kLimit);  // twice is once
  EXPECT_EQ(d.thread.counters().grants_live, 0U);
  EXPECT_EQ(d.thread.counters().transfers_received, 50U);
}

TEST_F(EngineThreadTest, RewindAnswersOrGivesUpInTime) {
  EXPECT_TRUE(p.thread.rewind({1}, kLimit).empty()) << "not started";
  ASSERT_TRUE(p.start().is_ok());
  offer(1);
  EXPECT_EQ(p.thread.rewind({1, 2}, kLimit), std::vector<Ticket>{1});
  p.thread.shutdown(0);
  EXPECT_TRUE(p.thread.rewind({1}, kLimit).empty());
}

TEST_F(EngineThreadTest, ShutdownDrainsAndTellsThePeer) {
  ASSERT_TRUE(p.start().is_ok());
  ASSERT_TRUE(d.start().is_ok());
  ASSERT_TRUE(meet().status.is_ok());
  grant(1, kLimit);
  p.thread.shutdown(kLimit);
  const EndAction end = d.wait_for(1);
  EXPECT_EQ(end.end, End::kFailed);
  grant(2, kLimit);
  EXPECT_EQ(d.wait_for(2).reason, Reason::kPeerLost);
}

TEST_F(EngineThreadTest, ConnectTimesOut) {
  ASSERT_TRUE(d.start().is_ok());
  PeerInfo nobody = p.info;
  nobody.transport_metadata = Bytes(1, std::byte{'P'});
  const auto targets = find_targets(std::vector{nobody}, std::vector{d.told()}, 0);
  const ConnectResult result = d.thread.connect(targets.value(), 50 * kMillisecond);
  EXPECT_EQ(result.status.reason(), Reason::kPeerUnreachable);
  EXPECT_FALSE(result.status.is_ok());
}

TEST_F(EngineThreadTest, StopAnswersWhoWaitsForAConnect) {
  ASSERT_TRUE(d.start().is_ok());
  PeerInfo nobody = p.info;
  nobody.transport_metadata = Bytes(1, std::byte{'P'});
  const auto targets = find_targets(std::vector{nobody}, std::vector{d.told()}, 0).value();
  ConnectResult result;
  std::thread waiting([&] { result = d.thread.connect(targets, kLimit); });
  while (d.thread.counters().peers == 0) {
    std::this_thread::yield();
  }
  d.thread.shutdown(0);
  waiting.join();
  EXPECT_EQ(result.status.reason(), Reason::kShutdown);
  EXPECT_EQ(d.thread.connect(targets, kLimit).status.reason(), Reason::kShutdown);
}

TEST_F(EngineThreadTest, ThreadHasTheConfiguredPolicy) {
  if (sched_getscheduler(0) != SCHED_OTHER) {
    GTEST_SKIP() << "the tests themselves run under another policy than SCHED_OTHER";
  }
  const MemoryRange range{reinterpret_cast<std::uint64_t>(p.memory.data()), p.memory.size(),
                          MemoryKind::kHost, 0};
  for (const ThreadPolicy policy : {ThreadPolicy::kBatch, ThreadPolicy::kNormal}) {
    LoopConfig loop;
    loop.policy = policy;
    EngineThread thread{EngineConfig{}, loop};
    pid_t id = 0;
    const Status started = thread.start(
        [&]() -> Result<std::unique_ptr<Transport>> {
          id = gettid();
          return std::unique_ptr<Transport>(std::make_unique<LinkTransport>(link, "x"));
        },
        make_host_fence(), {range}, p.info);
    ASSERT_TRUE(started.is_ok()) << started.message();
    EXPECT_EQ(sched_getscheduler(id), policy == ThreadPolicy::kBatch ? SCHED_BATCH : SCHED_OTHER);
  }
}

TEST_F(EngineThreadTest, StartErrorsAreReportedAndTheThreadIsGone) {
  EngineThread thread{EngineConfig{}, LoopConfig{}};
  const Status failed = thread.start(
      []() -> Result<std::unique_ptr<Transport>> { return Status::error("no such backend"); },
      make_host_fence(), {}, p.info);
  EXPECT_EQ(failed.message(), "no such backend");
  const Status no_memory = thread.start(
      [this]() -> Result<std::unique_ptr<Transport>> {
        return std::unique_ptr<Transport>(std::make_unique<LinkTransport>(link, "x"));
      },
      make_host_fence(), {}, p.info);
  EXPECT_EQ(no_memory.message(), "no memory");
  ASSERT_TRUE(p.start().is_ok());
  EXPECT_FALSE(p.start().is_ok());
}

TEST_F(EngineThreadTest, ManyThreadsMaySubmitAndPoll) {
  ASSERT_TRUE(p.start().is_ok());
  ASSERT_TRUE(d.start().is_ok());
  ASSERT_TRUE(meet().status.is_ok());
  constexpr Ticket kEach = 50;
  std::thread other([this] {
    for (Ticket ticket = 1; ticket <= kEach; ++ticket) {
      grant(ticket, kMillisecond);
      d.thread.submit(RevokeCommand{ticket});
    }
  });
  for (Ticket ticket = kEach + 1; ticket <= 2 * kEach; ++ticket) {
    offer(ticket);
    (void)p.thread.counters();
  }
  other.join();
  p.thread.shutdown(kLimit);
  d.thread.shutdown(kLimit);
  std::vector<EngineEvent> events;
  d.thread.poll(events);
  std::size_t ends = 0;
  for (const EngineEvent& event : events) {
    ends += std::holds_alternative<EndAction>(event) ? 1U : 0U;
  }
  EXPECT_EQ(ends, kEach);
}

}  // namespace
}  // namespace kvpush
