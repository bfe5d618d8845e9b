#include "engine_thread.h"

#include <sched.h>
#include <sys/prctl.h>
#include <utility>

namespace kvpush {

namespace {
// The kernel may delay a nap by this much; its default of 50 us is longer than our naps.
constexpr unsigned long kTimerSlackNs = 1'000;
// After GOODBYE, time for the transport to put it on the wire (NIXL sends while it is polled).
constexpr DurationNs kGoodbyeFlush = 20 * kMillisecond;

// Gives `value` to whoever waits for it under this id, if anybody still does.
template <typename T>
void answer(std::map<std::uint64_t, std::promise<T>>& waiting, std::uint64_t id, T& value) {
  if (auto found = waiting.extract(id); !found.empty()) {
    found.mapped().set_value(std::move(value));
  }
}

// A thread that a command wakes on the caller's own core would take that core at once, and the
// caller, in a hook of vLLM's engine loop, would wait while a whole request is planned and posted.
// A batch thread preempts nobody when it wakes: it gets a free core, or waits for one up to a time
// slice. Another policy than the usual one was somebody's choice and stays. Where a container
// forbids the change, only its gain is lost.
void become_batch_thread() {
  if (sched_getscheduler(0) != SCHED_OTHER) return;
  const sched_param no_priority{};
  sched_setscheduler(0, SCHED_BATCH, &no_priority);
}
}  // namespace

EngineThread::~EngineThread() {
  shutdown(0);
}

Status EngineThread::start(TransportFactory factory, std::unique_ptr<DeviceFence> fence,
                           std::vector<MemoryRange> memory, PeerInfo self) {
  const std::lock_guard lock(lifecycle_);
  if (thread_.joinable()) {
    return Status::error("the engine has been started already");
  }
  std::promise<Status> started;
  std::future<Status> result = started.get_future();
  {
    const std::lock_guard state(state_mutex_);
    running_ = true;
  }
  thread_ = std::thread([this, factory = std::move(factory), fence = std::move(fence),
                         memory = std::move(memory), self = std::move(self),
                         started = std::move(started)]() mutable {
    run(factory, std::move(fence), memory, std::move(self), std::move(started));
  });
  Status status = result.get();
  if (!status.is_ok()) {
    thread_.join();
  }
  return status;
}

void EngineThread::run(const TransportFactory& factory, std::unique_ptr<DeviceFence> fence,
                       const std::vector<MemoryRange>& memory, PeerInfo self,
                       std::promise<Status> started) {
  prctl(PR_SET_NAME, "kvpush", 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
  Result<std::unique_ptr<Transport>> transport = factory();
  if (loop_.policy == ThreadPolicy::kBatch) {
    // After the transport has started its own threads, which would inherit it.
    become_batch_thread();
  }
  Status status = transport.status();
  if (status.is_ok()) {
    status = transport.value()->register_memory(memory);
  }
  if (status.is_ok()) {
    Result<Bytes> metadata = transport.value()->local_metadata();
    status = metadata.status();
    if (status.is_ok()) {
      self.transport_metadata = std::move(metadata.value());
    }
  }
  if (!status.is_ok()) {
    const std::lock_guard state(state_mutex_);
    running_ = false;
    started.set_value(std::move(status));
    return;
  }
  peer_info_ = encode_peer_info(self);
  Engine engine(*transport.value(), clock_, *fence, engine_config_, std::move(self));
  started.set_value(Status::ok());
  loop(engine);
}

void EngineThread::loop(Engine& engine) {
  std::vector<Command> inbox;
  TimeNs last_progress = clock_.now();
  while (true) {
    inbox.clear();
    commands_.take(inbox);
    for (Command& command : inbox) {
      engine.handle(std::move(command));
    }
    const Activity activity = engine.tick();
    publish(engine);
    if (stop_.load(std::memory_order_acquire) && finish(engine)) {
      break;
    }
    if (activity == Activity::kBusy || !inbox.empty()) {
      last_progress = clock_.now();
    }
    nap(activity, last_progress);
  }
  std::map<std::uint64_t, std::promise<ConnectResult>> waiting;
  std::map<std::uint64_t, std::promise<std::vector<Ticket>>> rewinding;
  {
    const std::lock_guard lock(state_mutex_);
    running_ = false;
    waiting = std::exchange(connects_, {});
    rewinding = std::exchange(rewinds_, {});
  }
  for (auto& [id, promise] : waiting) {
    promise.set_value({id, Status::error("the engine has stopped", Reason::kShutdown)});
  }
  for (auto& [id, promise] : rewinding) {
    promise.set_value({});
  }
}

void EngineThread::nap(Activity activity, TimeNs last_progress) {
  if (activity == Activity::kIdle) {
    commands_.wait(loop_.idle_poll);
  } else if (clock_.now() - last_progress > loop_.spin) {
    commands_.nap(loop_.busy_poll);
  }
}

void EngineThread::publish(Engine& engine) {
  std::vector<EngineEvent> fresh;
  engine.take_events(fresh);
  const EngineCounters counters = engine.counters();
  fences_passed_.store(engine.fences_passed(), std::memory_order_release);
  std::vector<EngineEvent> events;
  {
    const std::lock_guard lock(state_mutex_);
    counters_ = counters;
    for (EngineEvent& event : fresh) {
      if (auto* met = std::get_if<ConnectResult>(&event)) {
        answer(connects_, met->id, *met);
      } else if (auto* rewound = std::get_if<RewindResult>(&event)) {
        answer(rewinds_, rewound->id, rewound->rewound);
      } else {
        events.push_back(std::move(event));
      }
    }
  }
  if (!events.empty()) {
    events_.put_all(events);
    has_events_.store(true, std::memory_order_release);
  }
}

// The shutdown sequence; true when the thread may end.
bool EngineThread::finish(Engine& engine) {
  if (!draining_) {
    draining_ = true;
    engine.handle(ShutdownCommand{});
  }
  const TimeNs until = drain_until_.load(std::memory_order_acquire);
  const bool drained = engine.drained();
  if (!drained && clock_.now() < until) {
    return false;
  }
  // A rank that still writes must not promise that it doesn't: peers then wait for their fence.
  if (drained) {
    engine.say_goodbye();
    const TimeNs flushed = clock_.now() + kGoodbyeFlush;
    while (clock_.now() < flushed) {
      engine.tick();
    }
  }
  publish(engine);
  return true;
}

ConnectResult EngineThread::connect(std::vector<PeerTarget> targets, DurationNs timeout) {
  ConnectCommand command;
  command.targets = std::move(targets);
  command.deadline = clock_.now() + timeout;
  std::future<ConnectResult> answer;
  {
    const std::lock_guard lock(state_mutex_);
    command.id = next_id_++;
    if (!running_) {
      return {command.id, Status::error("the engine is not running", Reason::kShutdown)};
    }
    answer = connects_[command.id].get_future();
  }
  commands_.put(std::move(command));
  return answer.get();
}

void EngineThread::submit(Command command) {
  commands_.put(std::move(command));
}

void EngineThread::submit_all(std::vector<Command>& commands) {
  commands_.put_all(commands);
}

std::vector<Ticket> EngineThread::rewind(std::vector<Ticket> tickets, DurationNs timeout) {
  RewindCommand command;
  command.tickets = std::move(tickets);
  std::future<std::vector<Ticket>> answer;
  {
    const std::lock_guard lock(state_mutex_);
    command.id = next_id_++;
    if (!running_) {
      return {};
    }
    answer = rewinds_[command.id].get_future();
  }
  const std::uint64_t id = command.id;
  commands_.put(std::move(command));
  if (answer.wait_for(std::chrono::nanoseconds(timeout)) == std::future_status::ready) {
    return answer.get();
  }
  const std::lock_guard lock(state_mutex_);
  if (rewinds_.erase(id) == 0) {
    return answer.get();  // it came at the last moment
  }
  return {};
}

void EngineThread::poll(std::vector<EngineEvent>& out) {
  if (has_events_.exchange(false, std::memory_order_acq_rel)) {
    events_.take(out);
  }
}

EngineCounters EngineThread::counters() const {
  const std::lock_guard lock(state_mutex_);
  return counters_;
}

void EngineThread::shutdown(DurationNs drain) {
  const std::lock_guard lock(lifecycle_);
  if (!thread_.joinable()) {
    return;
  }
  drain_until_.store(clock_.now() + drain, std::memory_order_release);
  stop_.store(true, std::memory_order_release);
  thread_.join();
}

}  // namespace kvpush
