// EngineThread: the one native thread of a rank. It owns the transport and the engine, and never
// enters Python. Every public method may be called from any thread.
//
// The loop spins while something happens, yields the core for short naps while something is live,
// and sleeps while nothing is. A command ends the sleep at once, and waits for the end of a nap:
// waking a thread would cost the caller more than the nap costs the transfer. A message from a peer
// can't wake it (NIXL has no way to wait), so the lengths are what its latency costs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine.h"
#include "mailbox.h"

namespace kvpush {

// kBatch: SCHED_BATCH. A thread that wakes preempts nobody, vLLM's thread least of all; where cores
// are short it waits for one up to a time slice. kNormal: whatever the process has.
enum class ThreadPolicy { kBatch, kNormal };

struct LoopConfig {
  DurationNs spin = 50 * kMicrosecond;       // keep spinning this long after the last progress
  DurationNs busy_poll = 20 * kMicrosecond;  // nap while something is live
  DurationNs idle_poll = kMillisecond;       // nap while nothing is
  ThreadPolicy policy = ThreadPolicy::kBatch;
};

class EngineThread {
 public:
  // Makes the transport; called once, on the native thread, which will own it.
  using TransportFactory = std::function<Result<std::unique_ptr<Transport>>()>;

  EngineThread(EngineConfig engine, LoopConfig loop) : engine_config_(engine), loop_(loop) {}
  // Stops without draining if shutdown() was not called.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Starts the thread, makes the transport, registers the memory. `self` gets its transport
  // metadata here. Blocks until that is done; on error the thread has ended.
  Status start(TransportFactory factory, std::unique_ptr<DeviceFence> fence,
               std::vector<MemoryRange> memory, PeerInfo self);
  // encode_peer_info() of this rank; empty before start().
  const Bytes& peer_info() const noexcept { return peer_info_; }

  // Meets peers; blocks until they have answered or `timeout` has passed.
  ConnectResult connect(std::vector<PeerTarget> targets, DurationNs timeout);
  void submit(Command command);
  // The same for several, at the price of one; empties `commands`.
  void submit_all(std::vector<Command>& commands);
  // See RewindCommand; blocks until its answer has come or `timeout` has passed. Gives the tickets
  // that may be offered anew: none after a time-out.
  std::vector<Ticket> rewind(std::vector<Ticket> tickets, DurationNs timeout);
  // Takes the events since the last call. Touches no lock while there are none.
  void poll(std::vector<EngineEvent>& out);
  bool has_events() const noexcept { return has_events_.load(std::memory_order_acquire); }
  // Device events up to this one may be recorded again; see Engine::fences_passed().
  std::uint64_t fences_passed() const noexcept {
    return fences_passed_.load(std::memory_order_acquire);
  }
  EngineCounters counters() const;

  // No new work; waits up to `drain` for handles and peers, says goodbye, joins. Idempotent.
  void shutdown(DurationNs drain);

 private:
  void run(const TransportFactory& factory, std::unique_ptr<DeviceFence> fence,
           const std::vector<MemoryRange>& memory, PeerInfo self, std::promise<Status> started);
  void loop(Engine& engine);
  void nap(Activity activity, TimeNs last_progress);
  void publish(Engine& engine);
  bool finish(Engine& engine);

  EngineConfig engine_config_;
  LoopConfig loop_;
  MonotonicClock clock_;
  std::thread thread_;
  std::mutex lifecycle_;  // start() and shutdown()
  Bytes peer_info_;

  Mailbox<Command> commands_;
  Mailbox<EngineEvent> events_;
  std::atomic<bool> has_events_{false};
  std::atomic<std::uint64_t> fences_passed_{0};
  mutable std::mutex state_mutex_;  // guards the next five
  EngineCounters counters_;
  std::map<std::uint64_t, std::promise<ConnectResult>> connects_;
  std::map<std::uint64_t, std::promise<std::vector<Ticket>>> rewinds_;
  bool running_ = false;
  std::uint64_t next_id_ = 1;  // of connects and rewinds

  std::atomic<bool> stop_{false};
  std::atomic<TimeNs> drain_until_{0};
  bool draining_ = false;  // native thread only
};

}  // namespace kvpush
