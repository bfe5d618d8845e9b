// Makes and posts transfers as the engine does, between two agents of this process, for
// bench/desc_prep.py: planner, Poster and NixlTransport over NIXL's C API are the product's own.
//
// Reads requests from standard input, one a line:
//   regions rounds post_rounds part_descriptors n  n producer ids  n consumer ids
// and answers each with one line of JSON, microseconds. `make` is from a plan to handles as the
// engine does it: from prepared lists where the planner wants them, else from runs; `listed` says
// which, and `prepare` what the lists took, once. The steps of the other way: `spell_out` is what
// the Poster does before NIXL, `fill_lists` that and NIXL's lists, `make_runs` all of it. Times are
// the quickest of the rounds: processor time of this thread, but elapsed time for the post. Bytes
// are compared after each post. `prepare` in place of a request asks for lists of every block of
// kMostRegions regions: seconds and megabytes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "check.h"
#include "clock.h"
#include "nixl_library.h"
#include "nixl_transport.h"
#include "poster.h"
#include "workload.h"

namespace kvpush {

// Reaches into the transport, whose post() makes a transfer and posts it in one.
class NixlTransportTimer {
 public:
  static Status fill_lists(NixlTransport& transport, const CopyBatch& batch) {
    return transport.fill_lists(batch, {transport.scratch_[0].local, transport.scratch_[0].remote});
  }
  static Result<NixlXferRequest*> make(NixlTransport& transport, const std::string& peer,
                                       const CopyBatch& batch, BytesView payload) {
    return transport.create_request(CopyDirection::kWrite, peer, batch, payload);
  }
  static void destroy(NixlTransport& transport, NixlXferRequest* request) {
    transport.destroy_request(request);
  }
};

namespace bench {
namespace {

constexpr std::uint32_t kMostRegions = 128;
constexpr std::uint64_t kMemoryBytes = std::uint64_t{kMostRegions} * kPoolBlocks * kBlockBytes;

double now_us(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

// The least of what some rounds say they took.
template <typename Round>
double quickest(std::uint32_t rounds, Round&& round) {
  double best = std::numeric_limits<double>::infinity();
  for (std::uint32_t i = 0; i < rounds; ++i)
    best = std::min(best, round());
  return best;
}

template <typename T>
T must(Result<T> result) {
  if (result.is_ok()) return std::move(result.value());
  std::fprintf(stderr, "%s\n", result.message().c_str());
  std::exit(1);
}
void must(const Status& status) {
  if (status.is_ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

double resident_mb() {
  double total_pages = 0;
  double resident_pages = 0;
  std::ifstream("/proc/self/statm") >> total_pages >> resident_pages;
  return resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e6;
}

// How far a part goes. Each step includes those before.
enum class Depth { kSpellOut, kFillLists, kMake, kPost };

// The production transport, stopped at some depth and timed.
class TimedTransport final : public Transport {
 public:
  explicit TimedTransport(NixlTransport& inner) : inner_(inner) {}
  Depth depth = Depth::kPost;
  double release_us = 0;  // spent giving handles back, which is timed on no side

  const std::string& local_name() const override { return inner_.local_name(); }
  Result<Bytes> local_metadata() override { return inner_.local_metadata(); }
  Status register_memory(std::span<const MemoryRange> ranges) override {
    return inner_.register_memory(ranges);
  }
  Result<std::string> add_peer(BytesView metadata) override { return inner_.add_peer(metadata); }
  void remove_peer(const std::string& name) override { inner_.remove_peer(name); }
  Status notify(const std::string& peer, BytesView payload) override {
    return inner_.notify(peer, payload);
  }
  Status poll_notifications(std::vector<Notification>& out) override {
    return inner_.poll_notifications(out);
  }
  Result<ListsId> prepare_lists(const std::string& peer, const BlockGrid& grid) override {
    return inner_.prepare_lists(peer, grid);
  }
  bool has_lists(const std::string& peer, ListsId lists) const override {
    return inner_.has_lists(peer, lists);
  }
  Result<HandleId> post(CopyDirection direction, const std::string& peer, const CopyBatch& batch,
                        BytesView payload) override {
    if (depth == Depth::kPost) return inner_.post(direction, peer, batch, payload);
    if (depth == Depth::kFillLists) must(NixlTransportTimer::fill_lists(inner_, batch));
    if (depth == Depth::kMake) made_ = must(NixlTransportTimer::make(inner_, peer, batch, payload));
    return HandleId{0};
  }
  HandleState poll(HandleId handle) override {
    return depth == Depth::kPost ? inner_.poll(handle) : HandleState::kDone;
  }
  void release(HandleId handle) override {
    if (depth == Depth::kPost) return inner_.release(handle);
    if (depth != Depth::kMake) return;
    const double start = now_us(CLOCK_THREAD_CPUTIME_ID);
    NixlTransportTimer::destroy(inner_, made_);
    release_us += now_us(CLOCK_THREAD_CPUTIME_ID) - start;
  }
  Counts counts() const override { return inner_.counts(); }

 private:
  NixlTransport& inner_;
  NixlXferRequest* made_ = nullptr;
};

struct Agent {
  Agent(const std::shared_ptr<const NixlLibrary>& library, const std::string& name)
      : memory(kMemoryBytes) {
    NixlTransportOptions options;
    options.agent_name = name;
    transport = must(NixlTransport::create(library, options));
    const MemoryRange range{address(), kMemoryBytes};
    must(transport->register_memory({&range, 1}));
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory.data()); }

  std::vector<std::uint8_t> memory;
  std::unique_ptr<NixlTransport> transport;
};

struct Request {
  std::uint32_t regions = 0;
  std::uint32_t rounds = 0;
  std::uint32_t post_rounds = 0;  // 0: not posted
  std::uint32_t part_descriptors = 0;
  BlockLists lists;
};

class Wire {
 public:
  explicit Wire(const std::shared_ptr<const NixlLibrary>& library)
      : producer_(library, "bench-producer"),
        consumer_(library, "bench-consumer"),
        timed_(*producer_.transport) {
    std::mt19937_64 random(0);  // NOLINT: the same in each run
    for (std::uint8_t& byte : producer_.memory)
      byte = static_cast<std::uint8_t>(random());
    peer_ = must(producer_.transport->add_peer(must(consumer_.transport->local_metadata())));
  }

  std::string answer(const Request& request) {
    CopyPlanner runs = make_planner(request.regions, producer_.address(), consumer_.address());
    CopyPlanner planner = make_planner(request.regions, producer_.address(), consumer_.address());
    const bool listed = wants_lists(request, planner);
    const double prepare = prepare_lists(planner);
    std::ostringstream json;
    json << "{\"plan\": " << best_plan(request, planner);
    json << ", \"spell_out\": " << best_make(request, runs, Depth::kSpellOut);
    json << ", \"fill_lists\": " << best_make(request, runs, Depth::kFillLists);
    json << ", \"make_runs\": " << best_make(request, runs, Depth::kMake);
    const double make = best_make(request, planner, Depth::kMake);
    json << ", \"make\": " << make;
    if (request.post_rounds != 0) json << ", \"post\": " << best_post(request, planner) - make;
    json << ", \"listed\": " << listed << ", \"prepare\": " << prepare << "}";
    drop_lists();
    return json.str();
  }

  // Of scattered ids in every region.
  std::string prepared_cost() {
    CopyPlanner planner = make_planner(kMostRegions, producer_.address(), consumer_.address());
    Request request;
    std::vector<BlockId> ids(64);
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<BlockId>(3 * i);
    request.lists = make_lists(ids, ids);
    KVPUSH_CHECK(wants_lists(request, planner), "these ids are scattered");
    const double before = resident_mb();
    const double seconds = prepare_lists(planner) / 1e6;
    std::ostringstream json;
    json << "{\"seconds\": " << seconds << ", \"mb\": " << resident_mb() - before
         << ", \"longest\": " << longest_prepare_us_ / 1e6 << "}";
    drop_lists();
    return json.str();
  }

 private:
  PostJob job(const Request& request, CopyPlanner& planner, Poster& poster) {
    PostJob job;
    job.to = 1;
    job.attempt = 1;
    job.peer_name = peer_;
    job.span = request.lists.span();
    job.plan = poster.take_spare_plan();
    must(planner.plan_pattern(job.span, request.lists.producer, request.lists.consumer, job.plan));
    return job;
  }

  double best_plan(const Request& request, CopyPlanner& planner) {
    PatternPlan plan;
    return quickest(request.rounds, [&] {
      const double start = now_us(CLOCK_THREAD_CPUTIME_ID);
      must(planner.plan_pattern(request.lists.span(), request.lists.producer,
                                request.lists.consumer, plan));
      return now_us(CLOCK_THREAD_CPUTIME_ID) - start;
    });
  }

  // From a plan to handles, given back at once as the engine does with those that have ended.
  double best_make(const Request& request, CopyPlanner& planner, Depth depth) {
    timed_.depth = depth;
    Poster poster(timed_, clock_, 1, {.max_batch_descriptors = request.part_descriptors});
    std::vector<PostEnded> ended;
    return quickest(request.rounds, [&] {
      PostJob next = job(request, planner, poster);
      ended.clear();
      timed_.release_us = 0;
      const double start = now_us(CLOCK_THREAD_CPUTIME_ID);
      poster.add(std::move(next));
      while (poster.queued() != 0)
        poster.step(may_post, ended);
      return now_us(CLOCK_THREAD_CPUTIME_ID) - start - timed_.release_us;
    });
  }

  // Make and post, which take turns in the engine, until everything is there.
  double best_post(const Request& request, CopyPlanner& planner) {
    timed_.depth = Depth::kPost;
    Poster poster(timed_, clock_, 1, {.max_batch_descriptors = request.part_descriptors});
    std::vector<PostEnded> ended;
    return quickest(request.post_rounds, [&] {
      PostJob next = job(request, planner, poster);
      ended.clear();
      const double start = now_us(CLOCK_MONOTONIC);
      poster.add(std::move(next));
      while (poster.queued() != 0) {
        poster.step(may_post, ended);
        must(consumer_.transport->poll_notifications(notifications_));
      }
      const double took = now_us(CLOCK_MONOTONIC) - start;
      notifications_.clear();
      if (ended.front().reason != Reason::kNone) must(Status::error(ended.front().detail));
      check_bytes(request);
      return took;
    });
  }

  void check_bytes(const Request& request) {
    const std::vector<BlockId>& from = request.lists.producer.front().ids;
    const std::vector<BlockId>& to = request.lists.consumer.front().ids;
    for (std::uint64_t region = 0; region < request.regions; ++region) {
      for (std::size_t i = 0; i < from.size(); ++i) {
        const std::uint64_t source = (region * kPoolBlocks + from[i]) * kBlockBytes;
        const std::uint64_t sink = (region * kPoolBlocks + to[i]) * kBlockBytes;
        if (std::memcmp(&producer_.memory[source], &consumer_.memory[sink], kBlockBytes) != 0) {
          must(Status::error("bytes differ"));
        }
      }
    }
    std::ranges::fill(consumer_.memory, std::uint8_t{0});
  }

  bool wants_lists(const Request& request, CopyPlanner& planner) {
    PatternPlan plan;
    must(planner.plan_pattern(request.lists.span(), request.lists.producer, request.lists.consumer,
                              plan));
    return planner.wants_lists();
  }

  // As the engine does in idle ticks: microseconds.
  double prepare_lists(CopyPlanner& planner) {
    double total = 0;
    while (const BlockGrid* grid = planner.wanted_grid()) {
      const double start = now_us(CLOCK_MONOTONIC);
      planner.set_lists(must(producer_.transport->prepare_lists(peer_, *grid)));
      const double took = now_us(CLOCK_MONOTONIC) - start;
      longest_prepare_us_ = std::max(longest_prepare_us_, took);
      total += took;
    }
    return total;
  }

  void drop_lists() {
    producer_.transport->remove_peer(peer_);
    peer_ = must(producer_.transport->add_peer(must(consumer_.transport->local_metadata())));
  }

  static bool may_post(ServeId /*serve*/, Session /*to*/) { return true; }

  Agent producer_;
  Agent consumer_;
  TimedTransport timed_;
  MonotonicClock clock_;
  std::string peer_;
  double longest_prepare_us_ = 0;
  std::vector<Notification> notifications_;
};

bool read_ids(std::istream& in, std::size_t count, std::vector<BlockId>& ids) {
  ids.resize(count);
  for (BlockId& id : ids)
    in >> id;
  return static_cast<bool>(in);
}

bool parse(const std::string& line, Request& request) {
  std::istringstream in(line);
  std::size_t count = 0;
  in >> request.regions >> request.rounds >> request.post_rounds >> request.part_descriptors >>
      count;
  std::vector<BlockId> producer;
  std::vector<BlockId> consumer;
  if (!in || count == 0 || count > kPoolBlocks || request.regions > kMostRegions ||
      request.part_descriptors == 0 || !read_ids(in, count, producer) ||
      !read_ids(in, count, consumer)) {
    return false;
  }
  request.lists = make_lists(std::move(producer), std::move(consumer));
  return true;
}

}  // namespace
}  // namespace bench
}  // namespace kvpush

int main(int argc, char** argv) {
  using namespace kvpush::bench;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s /absolute/path/of/libnixl_capi.so <requests\n", argv[0]);
    return 2;
  }
  Wire wire(must(kvpush::NixlLibrary::open(argv[1])));
  std::string line;
  while (std::getline(std::cin, line)) {
    Request request;
    if (line == "prepare") {
      std::cout << wire.prepared_cost() << std::endl;
    } else if (parse(line, request)) {
      std::cout << wire.answer(request) << std::endl;
    } else {
      std::fprintf(stderr, "not a request: %.80s\n", line.c_str());
      return 2;
    }
  }
  return 0;
}
