// Engine: joins the rendezvous, the planner and the poster over a Transport.
//
// Commands from Python go in through handle(), time passes in tick(), events for Python come out of
// take_events(). Loop thread only; nothing here blocks, and a tick does a bounded amount of work.
// It owns no thread and reads no clock but the one it was given, so the simulator drives it as it
// is.
//
// Proof of life (design, rule 2). A producer may write to a consumer only while that one still
// means what it granted. That a message arrived proves nothing: it may be as old as the time this
// process was stopped for, or the network slow. So every message carries its sender's clock as an
// opaque stamp, and a consumer sends the latest stamp it has seen back. Time counts from the stamp:
// a producer posts while the latest echo is younger than peer_timeout, and a consumer that has lost
// it waits, from what it sent last, for longer than that.
//
// Pull turns it round: a producer sends a consumer's latest stamp back, and names the meeting in
// which it serves it. The consumer posts READs while that is younger than peer_timeout; a producer
// that has lost it holds the blocks for longer than that.
//
// Meetings. A consumer counts its HELLOs to a producer and names the count in each message. A new
// one ends, on the producer, whatever belonged to an older: the consumer has waited for its fence
// and given those blocks back, and messages of the older meeting may still be on the way. One that
// ended because the producer has lost the consumer is not taken up again either, once the consumer
// knew that it had begun: what was revoked in it is forgotten, and a GRANT may come late. Older
// ones never are.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "clock.h"
#include "consumer.h"
#include "copy_plan.h"
#include "device_fence.h"
#include "peer_info.h"
#include "peering.h"
#include "poster.h"
#include "producer.h"
#include "transport.h"

namespace kvpush {

struct EngineConfig {
  bool pull = false;  // consumers READ; else producers WRITE. Equal on both sides of a pair
  ConsumerConfig consumer;
  ProducerConfig producer;
  PosterConfig poster;
  DurationNs keepalive = kSecond;
  // Silence after which a peer counts as lost; ten keepalives, so that a busy host is not taken for
  // a dead one.
  DurationNs peer_timeout = 10 * kSecond;
  // Added to peer_timeout before a lost writer's blocks are given back: covers one part being
  // posted (milliseconds) and clocks that run at slightly different rates.
  DurationNs fence_margin = 2 * kSecond;
  DurationNs hello_resend = 2 * kSecond;
  // Ranks; each costs some hundred KB: geometry, and 4 bytes for each block of the pool (and
  // group).
  std::size_t max_peers = 4'096;
  ListsRule lists;
  // Blocks in the prepared lists of all peers, both sides counted. They take no memory to speak of
  // from NIXL 1.4 on, 32 bytes each before that. 0: none are made.
  std::uint64_t max_prepared_blocks = 8U << 20;
};

// --- what goes in -------------------------------------------------------------------------------

// Meet these producer ranks. Answered by one ConnectResult with the same id.
struct ConnectCommand {
  std::uint64_t id = 0;
  std::vector<PeerTarget> targets;
  TimeNs deadline = 0;
};
struct RevokeCommand {
  Ticket ticket = 0;
};
// Makes or grows an offer once `event` has completed.
struct FencedOfferCommand {
  OfferCommand offer;
  DeviceEvent event = 0;
  std::uint64_t fence = 0;  // rises from one event to the next; see fences_passed()
};
// Takes back what was offered under these tickets: their blocks are about to hold something else.
// Answered by one RewindResult with the same id, once none of them is read any more.
struct RewindCommand {
  std::uint64_t id = 0;
  std::vector<Ticket> tickets;
};
struct WithdrawCommand {
  Ticket ticket = 0;
  Reason reason = Reason::kNone;
  bool has_key = false;  // say it under the key too: the ticket may never have been offered
  TransferKey key;
};
struct ShutdownCommand {};

using Command = std::variant<ConnectCommand, GrantCommand, RevokeCommand, FencedOfferCommand,
                             RewindCommand, WithdrawCommand, ShutdownCommand>;

// --- what comes out -----------------------------------------------------------------------------

struct ConnectResult {
  std::uint64_t id = 0;
  // Ok: all met. Else its reason is kPeerUnreachable (the transport can't reach it, or no answer in
  // time), kPeerLost, kTableFull, kIncompatible or kShutdown.
  Status status;
};
struct PeerLostEvent {
  Session session = 0;
  std::string why;
};
struct RewindResult {
  std::uint64_t id = 0;
  std::vector<Ticket> rewound;  // may be offered anew; the others have ended, or never were
};
using EngineEvent = std::variant<EndAction, PeerLostEvent, ConnectResult, RewindResult>;

// Sizes of tables, all zero at rest, then totals since the start.
struct EngineCounters {
  std::uint64_t grants_live = 0;
  std::uint64_t offers_live = 0;
  std::uint64_t served_live = 0;
  std::uint64_t handles_in_flight = 0;
  std::uint64_t posts_queued = 0;
  std::uint64_t fences_waiting = 0;

  std::uint64_t peers = 0;
  std::uint64_t prepared_blocks = 0;  // in prepared lists

  std::uint64_t transfers_received = 0;
  std::uint64_t transfers_sent = 0;
  std::uint64_t transfers_failed = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t descriptors_planned = 0;
  std::uint64_t descriptors_posted = 0;
  std::uint64_t writes_posted = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t reads_posted = 0;
  std::uint64_t posted_from_lists = 0;  // of the writes and reads
  std::uint64_t messages_received = 0;
  std::uint64_t messages_dropped = 0;
  std::uint64_t peers_lost = 0;
};

// How soon the loop must look again.
enum class Activity : std::uint8_t {
  kIdle = 0,     // only a message can change anything, and none is urgent
  kWaiting = 1,  // something is live and waits for a peer
  kBusy = 2,     // handles are in flight, or something has just happened
};

class Engine {
 public:
  // All references must outlive the engine. `self` describes this rank, metadata included.
  Engine(Transport& transport, const Clock& clock, DeviceFence& fence, EngineConfig config,
         PeerInfo self);

  void handle(Command command);
  Activity tick();
  // Moves the events since the last call into `out`.
  void take_events(std::vector<EngineEvent>& out);
  EngineCounters counters() const;
  // Events up to this `fence` are not asked about any more: their owner may record them again.
  std::uint64_t fences_passed() const noexcept;

  // After ShutdownCommand: true when nothing of this rank can be written or read any more.
  bool drained() const;
  // Tells every peer that this rank is gone and writes no more. Call when drained.
  void say_goodbye();

 private:
  struct Peer {
    std::string name;
    PeerInfo info;
    TimeNs last_heard = 0;
    TimeNs last_sent = 0;
    std::uint64_t their_stamp = 0;  // the latest seen
    // We are its consumer.
    bool greeted = false;  // HELLO sent
    bool welcomed = false;
    HelloMessage hello;
    TimeNs hello_sent = 0;
    std::uint64_t our_meeting = 0;
    std::unique_ptr<CopyPlanner> reader;  // pull: for READs from it
    // Pull: it held what it said READY, in this meeting, at this time of ours; 0: not known.
    TimeNs held = 0;
    // It is our consumer.
    std::unique_ptr<CopyPlanner> planner;
    std::uint32_t fan_out = 1;
    std::uint64_t their_meeting = 0;
    bool met = false;   // it knows that this meeting has begun
    TimeNs proven = 0;  // it was alive, in this meeting, at this time of ours; 0: not known
    std::uint64_t prepared_blocks = 0;  // of max_prepared_blocks
  };

  // Commands.
  void on(ConnectCommand command);
  void on(GrantCommand command);
  void tell_bystanders(GrantCommand& command);
  void on(RevokeCommand command);
  void on(FencedOfferCommand command);
  void on(RewindCommand command);
  void on(const WithdrawCommand& command);
  void on(ShutdownCommand command);
  Status greet(PeerTarget& target);
  void end_connect(std::uint64_t id, Status status);
  void settle_connects();
  void fail_connects(Session session, const Status& why);

  // Messages.
  bool receive();
  bool dispatch(const Notification& notification);
  bool on_message(Session from, HelloMessage& message, std::uint64_t meeting,
                  const std::string& claimed_name);
  bool on_message(Session from, const WelcomeMessage& message);
  bool on_message(Session from, const RefuseMessage& message);
  bool on_message(Session from, GrantMessage& message, std::uint64_t meeting, Actions& out);
  bool on_peer_message(Message& message, Actions& out);
  Result<Peer*> load_peer(const PeerInfo& info, const std::string* claimed_name);
  Status admit(const PeerInfo& info, HelloMessage& message, std::uint64_t meeting,
               const std::string& claimed_name);
  void note_freshness(Peer& peer, const Message& message);
  void note_held(Peer& peer, const Message& message);
  bool is_named(const std::string& name) const;
  bool is_over(Session consumer, std::uint64_t meeting) const;
  void remember_over(Session consumer, std::uint64_t meeting);

  // Actions.
  // Queues what a state machine wants done: `act` is called once, with a list to add to.
  template <typename Act>
  void collect(const Act& act) {
    act(scratch_);
    std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
    scratch_.clear();
  }
  void run_actions();
  Status add_copy(Poster& poster, CopyPlanner& planner, const BlockTable& local,
                  const BlockTable& remote, StateRegions states, PostJob job);
  void run(SendAction& action);
  void run(PostAction& action);
  void run(ReadAction& action);
  void run(EndAction& action);
  void run(DropPeerAction& action);
  void send(Session to, const MessageBody& body);
  void lose_peer(Session session, const std::string& why, bool writes_no_more);

  // Ticks.
  bool is_fresh(TimeNs proof) const;
  void end_post(PostEnded& post, Actions& out);
  void end_read(PostEnded& post, Actions& out);
  bool step(Poster& poster, const std::function<bool(std::uint64_t, Session)>& may_post,
            void (Engine::*end)(PostEnded&, Actions&));
  bool step_posts();
  bool step_reads();
  bool open_fences();
  void settle_rewinds();
  void deliver(OfferCommand offer);
  void deliver_empty(std::span<const Ticket> tickets);
  void tick_timers();
  void tick_peers();
  void want_lists(Session peer);
  bool has_time_for_lists() const;
  bool prepare_lists();
  bool prepare_lists(Peer& peer, CopyPlanner* planner);

  Transport& transport_;
  const Clock& clock_;
  DeviceFence& fence_;
  EngineConfig config_;
  PeerInfo self_;

  Consumer consumer_;
  Producer producer_;
  Poster poster_;
  Poster reader_;

  std::map<Session, Peer> peers_;
  std::map<std::uint64_t, ConnectCommand> connecting_;
  std::deque<FencedOfferCommand> fences_;
  std::uint64_t last_fence_ = 0;  // the latest that came
  std::vector<RewindCommand> rewinds_;
  std::deque<Action> actions_;
  std::vector<EngineEvent> events_;
  std::vector<Notification> inbox_;  // received, not yet handled from next_message_ on
  std::size_t next_message_ = 0;
  std::uint64_t meetings_ = 0;
  std::vector<PostEnded> ended_;  // scratch
  Actions scratch_;
  EngineCounters totals_;
  // Of lost consumers, the latest meeting that must not go on; the oldest loss first to be
  // forgotten.
  std::unordered_map<Session, std::uint64_t> over_;
  std::deque<Session> over_order_;
  std::set<Session> wanting_lists_;    // of the peers
  TimeNs lists_wanted_ = 0;            // since when, or since the last piece of them
  std::uint64_t prepared_blocks_ = 0;  // in all peers' lists
  TimeNs next_timers_ = 0;
  bool stopping_ = false;
};

}  // namespace kvpush
