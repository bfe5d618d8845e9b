// A whole engine, over the simulated fabric, with a peer that says what it likes: HELLOs, messages
// of any kind under any session, bytes that are none. The engine's own requests end once each, and
// when the peer has fallen silent its tables are empty. The first byte picks the mode.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arbitrary.h"
#include "engine.h"
#include "sim/sim_fabric.h"
#include "support/tiny_regions.h"

namespace kvpush::fuzz {
namespace {

constexpr Session kSelf = 100;
constexpr Session kPeer = 7;
constexpr std::uint32_t kBlocks = 4;
constexpr std::uint32_t kHeads = 2;

struct Memory {
  explicit Memory(sim::SimTransport& transport) : bytes(2 * kBlocks * tiny_block_bytes(kHeads)) {
    const MemoryRange range{address(), bytes.size(), MemoryKind::kHost, 0};
    (void)transport.register_memory({&range, 1});
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(bytes.data()); }
  Bytes bytes;
};

class EngineScript {
 public:
  explicit EngineScript(bool pull) {
    self_ = describe(kSelf, "self", *transport_, memory_);
    peer_ = describe(kPeer, "peer", *stranger_, stranger_memory_);
    (void)stranger_->add_peer(self_.transport_metadata);
    EngineConfig config;
    config.pull = pull;
    config.producer.granularity_tokens = 4;
    engine_ = std::make_unique<Engine>(*transport_, clock_, *fence_, config, self_);
  }

  void run(Input& in) {
    while (!in.empty()) {
      step(in);
    }
    engine_->handle(ShutdownCommand{});
    for (int i = 0; i < 150; ++i) {
      pass(4 * kSecond);
    }
    const EngineCounters counters = engine_->counters();
    KVPUSH_CHECK(engine_->drained() && counters.grants_live + counters.offers_live == 0,
                 "the engine comes to rest");
    KVPUSH_CHECK(counters.handles_in_flight + counters.posts_queued + counters.peers == 0,
                 "nothing is left of a silent peer");
    KVPUSH_CHECK(grants_.empty() && offers_.empty() && connects_.empty(), "every request ends");
    KVPUSH_CHECK(rewinds_.empty(), "every rewind is answered");
  }

 private:
  static PeerInfo describe(Session session, std::string name, sim::SimTransport& transport,
                           const Memory& memory) {
    PeerInfo info;
    info.session = session;
    info.engine_id = std::move(name);
    info.facts = {{"model", "tiny"}};
    info.regions = tiny_regions(memory.address(), kBlocks, 0, kHeads, kHeads);
    info.transport_metadata = transport.local_metadata().value();
    return info;
  }

  void step(Input& in) {
    switch (in.below(14)) {
      case 0:
        return say(in.bytes(in.byte()));
      case 1:
        return hello(in);
      case 2:
        return connect();
      case 3:
        return offer(in);
      case 4:
        return grant(in);
      case 5:
        return engine_->handle(RevokeCommand{1 + in.below(16)});
      case 6: {
        WithdrawCommand command{1 + in.below(16), Reason::kProducerAborted, in.flag(), {}};
        command.key = arbitrary_key(in);
        latest_rewind_.erase(command.ticket);
        return engine_->handle(std::move(command));
      }
      case 7: {  // the shortest leaves a READ or WRITE in flight while messages arrive
        static constexpr DurationNs kTimes[] = {kSecond, 2 * kMillisecond, kMillisecond / 5};
        return pass(kTimes[in.below(3)]);
      }
      case 8:
        return pass(in.below(15) * kSecond);
      case 9:
        return welcome();
      case 10:
        return rewind(in);
      default:
        return speak(in);
    }
  }

  void say(BytesView payload) { (void)stranger_->notify("self", payload); }
  void say(Session from, MessageBody body, std::uint64_t meeting, std::uint64_t echo) {
    Message message{from, std::move(body)};
    message.meeting = meeting;
    message.stamp = 1;
    message.echo = echo;
    message.serving = asked_;
    say(encode_message(message));
  }
  void hello(Input& in) {
    HelloMessage hello;
    hello.to = in.below(8) == 0 ? kSelf + 1 : kSelf;
    PeerInfo info = peer_;
    switch (in.below(8)) {
      case 0:
        info.regions[0].base ^= in.u64();
        break;
      case 1:
        info.regions[0].num_blocks = in.byte();
        break;
      case 2:
        info.facts[0].second = "another";
        break;
      case 3:
        info.session = 1 + in.below(8);
        break;
      case 4:
        info.transport_metadata.resize(in.byte());
        break;
      default:
        break;
    }
    hello.peer_info = encode_peer_info(info);
    hello.pairs = {{0, 0, 0, kHeads}, {1, 1, 0, kHeads}};
    if (in.below(4) == 0) {
      hello.pairs[0] = {in.below(3), in.below(3), in.below(3), in.below(4)};
    }
    hello.fan_out = in.below(3);
    say(info.session, std::move(hello), in.below(4), 0);
  }
  void speak(Input& in) {
    const Session from = in.below(8) == 0 ? kPeer + in.below(3) : kPeer;
    const std::uint64_t echo = in.flag() ? static_cast<std::uint64_t>(clock_.now()) : in.u64();
    const std::uint64_t meeting = in.below(4);
    say(from, arbitrary_body(in, kSelf), meeting, echo);
  }
  // The answer to the engine's latest HELLO.
  void welcome() { say(kPeer, WelcomeMessage{kSelf, asked_}, 0, 0); }

  void connect() {
    ConnectCommand command;
    command.id = next_++;
    command.targets = {{peer_, {{0, 0, 0, kHeads}, {1, 1, 0, kHeads}}, 1}};
    command.deadline = clock_.now() + 10 * kSecond;
    connects_[command.id] = true;
    engine_->handle(std::move(command));
  }
  void offer(Input& in) {
    FencedOfferCommand command;
    command.offer.ticket = next_++;
    command.offer.key = arbitrary_key(in);
    command.offer.watermark = in.below(17);
    command.offer.final = in.below(4) != 0;
    command.offer.new_blocks = {GroupBlocks{0, {0, 1, 2, 3}}};
    offers_[command.offer.ticket] = true;
    keys_[command.offer.ticket] = command.offer.key;
    engine_->handle(std::move(command));
  }
  void grant(Input& in) {
    GrantMessage drawn = arbitrary_grant(in);
    GrantCommand command;
    command.ticket = next_++;
    command.attempt = drawn.attempt;
    command.key = drawn.key;
    command.span = drawn.span;
    command.blocks = std::move(drawn.blocks);
    command.writers = {kPeer};
    command.deadline = clock_.now() + 30 * kSecond;
    grants_[command.ticket] = true;
    engine_->handle(std::move(command));
  }

  void rewind(Input& in) {
    RewindCommand command;
    command.id = next_++;
    for (std::uint32_t left = 1 + in.below(2); left != 0; --left) {
      command.tickets.push_back(1 + in.below(16));
      latest_rewind_[command.tickets.back()] = command.id;
    }
    rewinds_[command.id] = true;
    engine_->handle(std::move(command));
  }
  // Its blocks may be overwritten now; those that are left are offered anew.
  void rewound(const RewindResult& result) {
    KVPUSH_CHECK(rewinds_.erase(result.id) == 1, "answered once");
    for (const Ticket ticket : result.rewound) {
      KVPUSH_CHECK(offers_.contains(ticket), "what has ended is not offered anew");
      const auto latest = latest_rewind_.find(ticket);
      if (latest == latest_rewind_.end() || latest->second != result.id) {
        continue;  // withdrawn, rewound again, or named twice
      }
      latest_rewind_.erase(latest);
      FencedOfferCommand command;
      command.offer.ticket = ticket;
      command.offer.key = keys_.at(ticket);
      command.offer.watermark = 16;
      command.offer.new_blocks = {GroupBlocks{0, {3, 2, 1, 0}}};
      command.offer.final = true;
      engine_->handle(std::move(command));
    }
  }

  void pass(DurationNs time) {
    queue_.run_until(queue_.now() + time);
    for (int i = 0; i < 4; ++i) {
      engine_->tick();
    }
    std::vector<EngineEvent> events;
    engine_->take_events(events);
    for (const EngineEvent& event : events) {
      if (const auto* end = std::get_if<EndAction>(&event)) {
        KVPUSH_CHECK((end->is_grant ? grants_ : offers_).erase(end->ticket) == 1, "ends once");
      } else if (const auto* result = std::get_if<ConnectResult>(&event)) {
        KVPUSH_CHECK(connects_.erase(result->id) == 1, "answered once");
      } else if (const auto* rewind = std::get_if<RewindResult>(&event)) {
        rewound(*rewind);
      }
    }
    // Every end that was told gave its blocks back.
    KVPUSH_CHECK(!(grants_.empty() && offers_.empty()) ||
                     !fabric_.is_source_in_flight(transport_->life(), memory_.address(),
                                                  memory_.bytes.size()),
                 "blocks go back when nothing touches them");
    std::vector<Notification> said;
    (void)stranger_->poll_notifications(said);
    for (const Notification& notification : said) {
      const Result<Message> message = parse_message(notification.payload);
      KVPUSH_CHECK(message.is_ok(), "the engine speaks sense");
      if (std::holds_alternative<HelloMessage>(message.value().body)) {
        asked_ = message.value().meeting;
      }
    }
  }

  static sim::FabricFaults faults() {
    sim::FabricFaults faults;
    faults.removal_breaks = false;
    return faults;
  }

  sim::EventQueue queue_;
  sim::SimFabric fabric_{queue_, sim::Random(1), faults()};
  sim::SimClock clock_{queue_, 0, 0};
  std::unique_ptr<sim::SimTransport> transport_ = fabric_.attach("self");
  std::unique_ptr<sim::SimTransport> stranger_ = fabric_.attach("peer");
  Memory memory_{*transport_};
  Memory stranger_memory_{*stranger_};
  std::unique_ptr<DeviceFence> fence_ = make_host_fence();
  PeerInfo self_;
  PeerInfo peer_;
  std::unique_ptr<Engine> engine_;
  std::map<Ticket, bool> grants_;
  std::map<Ticket, bool> offers_;
  std::map<Ticket, TransferKey> keys_;  // of the offers
  std::map<std::uint64_t, bool> connects_;
  std::map<std::uint64_t, bool> rewinds_;
  std::map<Ticket, std::uint64_t> latest_rewind_;  // whose result is waited for, to offer anew
  std::uint64_t asked_ = 0;
  std::uint64_t next_ = 1;
};

}  // namespace
}  // namespace kvpush::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvpush::fuzz::Input in(data, size);
  kvpush::fuzz::EngineScript(in.flag()).run(in);
  return 0;
}
