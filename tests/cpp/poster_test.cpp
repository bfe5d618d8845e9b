#include "poster.h"

#include <set>

#include <gtest/gtest.h>

#include "message.h"
#include "sim/sim_fabric.h"

namespace kvpush {
namespace {

constexpr Session kSelf = 1;
constexpr Session kPeer = 2;

class PosterTest : public ::testing::Test {
 protected:
  void SetUp() override { begin({}, {}); }

  void begin(PosterConfig config, sim::FabricFaults faults) {
    poster.reset();
    near.reset();
    far.reset();
    fabric = std::make_unique<sim::SimFabric>(queue, sim::Random(1), faults);
    near = fabric->attach("near");
    far = fabric->attach("far");
    near->map_memory(0x10000, source.data(), source.size());
    far->map_memory(0x20000, target.data(), target.size());
    const MemoryRange here{0x10000, source.size(), MemoryKind::kHost, 0};
    const MemoryRange there{0x20000, target.size(), MemoryKind::kHost, 0};
    ASSERT_TRUE(near->register_memory({&here, 1}).is_ok());
    ASSERT_TRUE(far->register_memory({&there, 1}).is_ok());
    ASSERT_TRUE(near->add_peer(far->local_metadata().value()).is_ok());
    poster = std::make_unique<Poster>(*near, clock, kSelf, config);
    for (std::size_t i = 0; i < source.size(); ++i) {
      source[i] = static_cast<std::byte>(i * 7 + 1);
    }
    std::fill(target.begin(), target.end(), std::byte{0});
  }

  static PostJob job(ServeId serve, const std::vector<std::uint64_t>& lengths) {
    PostJob job;
    job.serve = serve;
    job.to = kPeer;
    job.peer_name = "far";
    job.attempt = serve;
    job.span = {0, 16};
    std::uint64_t at = 0;
    for (const std::uint64_t length : lengths) {
      job.plan.runs.push_back({0x10000 + at, 0x20000 + at, length});
      at += length;
    }
    if (!lengths.empty()) {
      PatternPlan::Section section;
      section.runs_end = static_cast<std::uint32_t>(lengths.size());
      section.bases_end = 1;
      job.plan.bases.push_back({});
      job.plan.sections.push_back(section);
      job.plan.total_runs = lengths.size();
    }
    return job;
  }
  void step(int times = 1) {
    for (int i = 0; i < times; ++i) {
      poster->step([this](ServeId serve, Session) { return !forbidden.contains(serve); }, ended);
    }
  }
  void run() {
    for (int i = 0; i < 200; ++i) {
      step();
      queue.run_until(queue.now() + kMillisecond);
    }
  }
  std::vector<WrittenMessage> told() {
    std::vector<Notification> inbox;
    EXPECT_TRUE(far->poll_notifications(inbox).is_ok());
    std::vector<WrittenMessage> messages;
    for (const Notification& notification : inbox) {
      const Result<Message> message = parse_message(notification.payload);
      EXPECT_TRUE(message.is_ok());
      messages.push_back(std::get<WrittenMessage>(message.value().body));
    }
    return messages;
  }
  bool copied(std::size_t size) const {
    return std::equal(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(size),
                      target.begin());
  }

  sim::EventQueue queue;
  sim::SimClock clock{queue, 0, 0};
  Bytes source = Bytes(4096);
  Bytes target = Bytes(4096);
  std::unique_ptr<sim::SimFabric> fabric;
  std::unique_ptr<sim::SimTransport> near;
  std::unique_ptr<sim::SimTransport> far;
  std::unique_ptr<Poster> poster;
  std::set<ServeId> forbidden;
  std::vector<PostEnded> ended;
};

TEST_F(PosterTest, PartsAreCutByDescriptorsAndEachIsAnnounced) {
  PosterConfig config;
  config.max_batch_descriptors = 2;
  begin(config, {});
  poster->add(job(5, {10, 20, 30, 40, 50}));
  run();
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].serve, 5U);
  EXPECT_EQ(ended[0].reason, Reason::kNone);
  EXPECT_EQ(ended[0].stats.bytes, 150U);
  EXPECT_EQ(ended[0].stats.descriptors, 5U);
  std::set<std::uint32_t> parts;
  for (const WrittenMessage& message : told()) {
    EXPECT_EQ(message.parts, 3U);
    EXPECT_EQ(message.attempt, 5U);
    parts.insert(message.part);
  }
  EXPECT_EQ(parts, (std::set<std::uint32_t>{0, 1, 2}));
  EXPECT_TRUE(copied(150));
  EXPECT_EQ(poster->handles_in_flight(), 0U);
  EXPECT_EQ(near->counts().handles, 0U);
}

TEST_F(PosterTest, TheTimesOfTheFirstAndTheLastPostAreKept) {
  PosterConfig config;
  config.max_batch_descriptors = 1;
  begin(config, {});
  queue.run_until(kSecond);
  poster->add(job(5, {10, 20, 30}));
  run();  // one part each millisecond
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].stats.first_post, kSecond);
  EXPECT_EQ(ended[0].stats.last_post, kSecond + 2 * kMillisecond);

  PostStats sum;
  sum.add(ended[0].stats);
  PostStats later;
  later.first_post = 5 * kSecond;
  later.last_post = 6 * kSecond;
  sum.add(later);
  sum.add(PostStats{});  // of a serve that posted nothing
  EXPECT_EQ(sum.first_post, kSecond);
  EXPECT_EQ(sum.last_post, 6 * kSecond);
}

TEST_F(PosterTest, PartsAreCutByBytesAndLongRunsAreSplit) {
  PosterConfig config;
  config.max_batch_bytes = 100;
  begin(config, {});
  poster->add(job(5, {60, 60, 350, 10}));
  run();
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].stats.bytes, 480U);
  EXPECT_EQ(ended[0].stats.descriptors, 7U);
  EXPECT_EQ(told().size(), 6U);  // 60, 60, 100, 100, 100, 50 + 10
  EXPECT_TRUE(copied(480));
}

TEST_F(PosterTest, EmptyPlanIsAnnounced) {
  poster->add(job(5, {}));
  run();
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].reason, Reason::kNone);
  const auto messages = told();
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_EQ(messages[0].parts, 1U);
}

TEST_F(PosterTest, WhatMayNotBePostedAnyMoreIsDroppedAndThePostedIsWaitedFor) {
  PosterConfig config;
  config.max_batch_descriptors = 1;
  begin(config, {});
  poster->add(job(5, {10, 20, 30}));
  step();
  forbidden.insert(5);
  step(5);
  EXPECT_TRUE(ended.empty());  // one handle is in flight
  EXPECT_EQ(poster->handles_posted(), 1U);
  run();
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_NE(ended[0].reason, Reason::kNone);
  EXPECT_EQ(told().size(), 1U);
}

TEST_F(PosterTest, OneFailureWaitsForTheOtherParts) {
  PosterConfig config;
  config.max_batch_descriptors = 1;
  sim::FabricFaults faults;
  faults.write_error_per_mille = 400;
  begin(config, faults);
  poster->add(job(5, std::vector<std::uint64_t>(50, 10)));
  for (int i = 0; i < 200 && ended.empty(); ++i) {
    step();
    queue.run_until(queue.now() + 50 * kMicrosecond);
  }
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].reason, Reason::kTransportError);
  EXPECT_EQ(near->counts().handles, 0U);
  EXPECT_LT(poster->handles_posted(), 50U);
}

TEST_F(PosterTest, RefusedPostEndsTheJob) {
  sim::FabricFaults faults;
  faults.post_error_per_mille = 1'000;
  begin({}, faults);
  poster->add(job(5, {10}));
  step();
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].reason, Reason::kTransportError);
}

TEST_F(PosterTest, HandlesInFlightAreBoundedForEachPeer) {
  PosterConfig config;
  config.max_batch_descriptors = 1;
  config.max_handles_in_flight = 3;
  sim::FabricFaults faults;
  faults.stuck_per_mille = 1'000;
  begin(config, faults);
  poster->add(job(5, std::vector<std::uint64_t>(10, 10)));
  PostJob other = job(6, {10});
  other.to = kPeer + 1;  // as good as another: the name is the transport's matter
  poster->add(std::move(other));
  step(20);
  EXPECT_EQ(poster->handles_in_flight(), 4U);
  near->remove_peer("far");
  forbidden = {5, 6};
  run();
  EXPECT_EQ(ended.size(), 2U);
  EXPECT_EQ(near->counts().handles, 0U);
}

}  // namespace
}  // namespace kvpush
