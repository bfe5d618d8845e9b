// SimFabric and SimTransport: a Transport over simulated time and memory, with faults.
//
// One fabric joins all processes of a world; each process has a SimTransport. What the faults allow
// is what the real transport could do: notifications are late, come twice or (where a seed says so)
// out of order, and vanish only with a peer or a connection; a WRITE or READ is done in torn
// slices, each of which looks at its source as late as it can, ends late, fails when posted or at
// its end, or never ends; metadata goes bad until the peer is loaded again. Thread: one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "sim/event_queue.h"
#include "sim/random.h"
#include "transport.h"

namespace kvpush::sim {

// Names one life of one process; never reused.
using LifeId = std::uint64_t;

struct FabricFaults {
  DurationNs delay_min = 10 * kMicrosecond;
  DurationNs delay_max = 200 * kMicrosecond;
  std::uint32_t late_per_mille = 0;  // notifications that take up to `late_max`
  DurationNs late_max = 0;
  std::uint32_t duplicate_per_mille = 0;
  bool reorder = false;  // else one connection keeps its order
  // A notification is counted as sent, and lost, or refused, once the receiver has removed the
  // sender. Writes of that connection are then refused as well.
  bool removal_breaks = true;
  bool copy_at_post = false;  // a WRITE is in memory when post() returns
  DurationNs write_max = 2 * kMillisecond;
  std::uint32_t post_error_per_mille = 0;
  std::uint32_t write_error_per_mille = 0;
  std::uint32_t stuck_per_mille = 0;       // a WRITE that never ends while the peer is there
  std::uint32_t invalidate_per_mille = 0;  // each send or post: metadata goes bad
  std::uint32_t unloadable_per_mille = 0;  // a peer's metadata can't be loaded
  std::uint32_t unlistable_per_mille = 0;  // lists can't be prepared
};

// A transfer as it is posted, and one piece of it reaching memory: `from` has posted it.
struct Posted {
  HandleId id = 0;
  LifeId from = 0;
  LifeId to = 0;
  CopyDirection direction = CopyDirection::kWrite;
  const std::vector<CopyRun>* runs = nullptr;
  const Bytes* payload = nullptr;  // a WRITE's notification
};
struct AppliedSlice {
  HandleId id = 0;
  LifeId from = 0;
  LifeId to = 0;
  CopyDirection direction = CopyDirection::kWrite;
  CopyRun run;
  const Bytes* payload = nullptr;
};

class SimTransport;

class SimFabric {
 public:
  SimFabric(EventQueue& queue, Random random, FabricFaults faults)
      : queue_(queue), random_(random), faults_(faults) {}
  SimFabric(const SimFabric&) = delete;
  SimFabric& operator=(const SimFabric&) = delete;

  // A new process under this name. It lives as long as the transport does.
  std::unique_ptr<SimTransport> attach(std::string name);

  // From here on nothing goes wrong; what is stuck stays so until its peer is removed.
  void heal();
  // Called before a slice is copied.
  std::function<void(const AppliedSlice&)> on_slice;
  // Called when a notification is in the receiver's inbox, and when a transfer is posted.
  std::function<void(LifeId from, LifeId to, const Bytes& payload)> on_delivered;
  std::function<void(const Posted&)> on_posted;
  // Whether a WRITE or READ that has not ended touches this memory of a life's own.
  bool is_source_in_flight(LifeId owner, std::uint64_t address, std::uint64_t length) const;
  // Transfers that were told as blocks of prepared lists.
  std::uint64_t posted_from_lists() const noexcept { return posted_from_lists_; }
  // A number that is equal for equal runs.
  std::uint64_t run_hash() const noexcept { return hash_; }
  EventQueue& queue() noexcept { return queue_; }

 private:
  friend class SimTransport;
  struct Connection {
    LifeId to = 0;
    std::uint64_t removals_seen = 0;  // of us by the other side, when the connection was made
    bool invalid = false;
  };
  struct Mapping {
    std::uint64_t length = 0;
    std::byte* memory = nullptr;
  };
  struct Life {
    std::string name;
    SimTransport* transport = nullptr;
    std::map<std::uint64_t, Mapping> mapped;  // address space, where it is not the real one
    std::map<std::uint64_t, Mapping> registered;
    std::map<std::string, Connection> peers;
    std::map<std::string, std::map<ListsId, BlockGrid>> lists;  // by peer
    std::map<LifeId, std::uint64_t> removals;  // how often it has removed each other life
    std::vector<Notification> inbox;
  };
  struct Transfer {
    LifeId from = 0;
    LifeId to = 0;
    std::uint64_t removals_seen = 0;
    CopyDirection direction = CopyDirection::kWrite;
    std::vector<CopyRun> runs;
    Bytes payload;
    std::uint64_t bytes = 0;
    HandleState state = HandleState::kInProgress;
    bool stuck = false;
    bool told = false;
  };

  bool is_broken(LifeId from, const Connection& connection) const;
  std::byte* find_memory(const Life& life, std::uint64_t address, std::uint64_t length) const;
  void send(LifeId from, const Connection& connection, BytesView payload);
  void deliver(LifeId from, LifeId to, std::uint64_t removals_seen, const Bytes& payload);
  void start(HandleId id);
  void apply(HandleId id, std::uint64_t begin, std::uint64_t end);
  void apply_run(HandleId id, const Transfer& transfer, const CopyRun& run);
  void end(HandleId id, HandleState state);
  bool still_goes(const Transfer& transfer) const;
  void fail_soon(LifeId from, LifeId to);
  void detach(LifeId life);
  void note(std::uint64_t value) noexcept { hash_ = (hash_ ^ value) * 1099511628211U; }

  EventQueue& queue_;
  Random random_;
  FabricFaults faults_;
  LifeId next_life_ = 1;
  HandleId next_handle_ = 1;
  ListsId next_lists_ = 1;
  std::uint64_t posted_from_lists_ = 0;
  std::map<LifeId, Life> lives_;
  std::map<HandleId, Transfer> transfers_;
  std::map<std::pair<LifeId, LifeId>, TimeNs> last_arrival_;
  std::uint64_t hash_ = 14695981039346656037U;
};

class SimTransport final : public Transport {
 public:
  SimTransport(SimFabric& fabric, LifeId life) : fabric_(fabric), life_(life) {}
  ~SimTransport() override { fabric_.detach(life_); }
  SimTransport(const SimTransport&) = delete;
  SimTransport& operator=(const SimTransport&) = delete;

  LifeId life() const noexcept { return life_; }
  // Lets `memory` stand at `address` of this process, so that addresses are the same in every run.
  void map_memory(std::uint64_t address, std::byte* memory, std::uint64_t length);

  const std::string& local_name() const override;
  Result<Bytes> local_metadata() override;
  Status register_memory(std::span<const MemoryRange> ranges) override;
  Result<std::string> add_peer(BytesView metadata) override;
  void remove_peer(const std::string& peer_name) override;
  Status notify(const std::string& peer_name, BytesView payload) override;
  Status poll_notifications(std::vector<Notification>& out) override;
  Result<ListsId> prepare_lists(const std::string& peer_name, const BlockGrid& grid) override;
  bool has_lists(const std::string& peer_name, ListsId lists) const override;
  Result<HandleId> post(CopyDirection direction, const std::string& peer_name,
                        const CopyBatch& batch, BytesView payload) override;
  HandleState poll(HandleId handle) override;
  void release(HandleId handle) override;
  Counts counts() const override;

 private:
  SimFabric::Life& self() const { return fabric_.lives_.at(life_); }
  Result<SimFabric::Connection*> usable_peer(const std::string& peer_name);
  Result<std::vector<CopyRun>> runs_of(const std::string& peer_name, const CopyBatch& batch) const;

  SimFabric& fabric_;
  LifeId life_;
};

}  // namespace kvpush::sim
