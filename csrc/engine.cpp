#include "engine.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace kvpush {

namespace {
// Timers are for seconds: looking at every table 200 times a second is exact enough and costs
// little.
constexpr DurationNs kTimerInterval = 5 * kMillisecond;
// Parts posted in one tick before messages get a turn again.
constexpr int kPartsPerTick = 4;
// Messages handled in one tick before posts get a turn again: some 0.1 ms.
constexpr std::size_t kMessagesPerTick = 256;
// How long prepared lists wait for a moment in which no transfer is under way.
constexpr DurationNs kListsPatience = 100 * kMillisecond;

EngineConfig with_mode(EngineConfig config) {
  config.consumer.reads = config.pull;
  config.producer.reads = config.pull;
  return config;
}
}  // namespace

Engine::Engine(Transport& transport, const Clock& clock, DeviceFence& fence, EngineConfig config,
               PeerInfo self)
    : transport_(transport),
      clock_(clock),
      fence_(fence),
      config_(with_mode(config)),
      self_(std::move(self)),
      consumer_(config_.consumer),
      producer_(config_.producer),
      poster_(transport, clock, self_.session, config.poster),
      reader_(transport, clock, self_.session, config.poster, CopyDirection::kRead) {
  KVPUSH_CHECK(self_.session != 0, "a session is a nonzero random number");
}

// --- commands -----------------------------------------------------------------------------------

void Engine::handle(Command command) {
  std::visit([this](auto&& body) { on(std::forward<decltype(body)>(body)); }, std::move(command));
  run_actions();
}

void Engine::on(ConnectCommand command) {
  const std::uint64_t id = command.id;
  if (stopping_) {
    end_connect(id, Status::error("the engine is stopping", Reason::kShutdown));
    return;
  }
  // A peer lost on the way ends the connect, and its entry: the targets must outlive that.
  std::vector<PeerTarget> targets = command.targets;
  connecting_.insert_or_assign(id, std::move(command));
  for (PeerTarget& target : targets) {
    Status status = greet(target);
    if (!connecting_.contains(id)) {
      return;
    }
    if (!status.is_ok()) {
      if (status.reason() == Reason::kNone) {
        status = Status::error(status.message(), Reason::kIncompatible);
      }
      end_connect(id, std::move(status));
      return;
    }
  }
  settle_connects();
}

// Loads a producer rank and sends it HELLO, unless that was done before.
Status Engine::greet(PeerTarget& target) {
  const Session session = target.info.session;
  Peer* peer = nullptr;
  if (const auto found = peers_.find(session); found != peers_.end()) {
    peer = &found->second;
  } else {
    const Result<Peer*> loaded = load_peer(target.info, nullptr);
    if (!loaded.is_ok()) {
      return loaded.status();
    }
    peer = loaded.value();
  }
  if (peer->greeted) {
    return Status::ok();
  }
  peer->greeted = true;
  peer->our_meeting = ++meetings_;
  peer->hello.to = session;
  peer->hello.peer_info = encode_peer_info(self_);
  peer->hello.pairs = target.pairs;
  peer->hello.fan_out = target.fan_out;
  peer->hello_sent = clock_.now();
  if (config_.pull) {
    peer->reader =
        std::make_unique<CopyPlanner>(self_.regions, peer->info.regions, target.pairs, false);
    peer->reader->set_lists_rule(config_.lists);
  }
  send(session, peer->hello);
  return Status::ok();
}

bool Engine::is_named(const std::string& name) const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [&name](const auto& entry) { return entry.second.name == name; });
}

// Loads the metadata of a session that is not among the peers. `claimed_name`, if not null, is the
// name it must turn out to have.
Result<Engine::Peer*> Engine::load_peer(const PeerInfo& info, const std::string* claimed_name) {
  if (peers_.size() >= config_.max_peers) {
    return Status::error("this rank has " + std::to_string(peers_.size()) +
                             " peers, which is its limit; spread the prefill engines over more "
                             "decode engines",
                         Reason::kTableFull);
  }
  Result<std::string> name = transport_.add_peer(info.transport_metadata);
  if (!name.is_ok()) {
    return name.status();
  }
  if (claimed_name != nullptr && name.value() != *claimed_name) {
    if (!is_named(name.value())) {  // else it would be another peer's that is removed
      transport_.remove_peer(name.value());
    }
    return Status::error("the sender is not who its metadata says");
  }
  const auto namesake = std::find_if(peers_.begin(), peers_.end(), [&name](const auto& entry) {
    return entry.second.name == name.value();
  });
  if (namesake != peers_.end()) {
    // The process behind this name has started anew. Losing the old session removes the name.
    lose_peer(namesake->first, "it has been started anew", false);
    name = transport_.add_peer(info.transport_metadata);
    if (!name.is_ok()) {
      return name.status();
    }
  }
  Peer& peer = peers_[info.session];
  peer.name = name.value();
  peer.info = info;
  peer.last_heard = clock_.now();
  return &peer;
}

void Engine::end_connect(std::uint64_t id, Status status) {
  connecting_.erase(id);
  events_.emplace_back(ConnectResult{id, std::move(status)});
}

// Answers the connects whose peers have all said WELCOME, or whose time is up.
void Engine::settle_connects() {
  const TimeNs now = clock_.now();
  std::vector<std::pair<std::uint64_t, std::string>> over;  // id, silent peer or ""
  for (const auto& [id, command] : connecting_) {
    std::string silent;
    for (const PeerTarget& target : command.targets) {
      const auto peer = peers_.find(target.info.session);
      if (peer == peers_.end() || !peer->second.welcomed) {
        silent = target.info.engine_id + " rank " + std::to_string(target.info.tp_rank);
      }
    }
    if (silent.empty() || now >= command.deadline) {
      over.emplace_back(id, silent);
    }
  }
  for (auto& [id, silent] : over) {
    end_connect(id, silent.empty()
                        ? Status::ok()
                        : Status::error("no answer to HELLO from " + silent +
                                            "; is it alive, and can the transport reach it?",
                                        Reason::kPeerUnreachable));
  }
}

void Engine::fail_connects(Session session, const Status& why) {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, command] : connecting_) {
    if (std::any_of(command.targets.begin(), command.targets.end(),
                    [&](const PeerTarget& t) { return t.info.session == session; })) {
      ids.push_back(id);
    }
  }
  for (const std::uint64_t id : ids) {
    end_connect(id, why);
  }
}

void Engine::on(GrantCommand command) {
  const TimeNs now = clock_.now();
  const auto stranger =
      std::find_if(command.writers.begin(), command.writers.end(), [this](Session session) {
        const auto peer = peers_.find(session);
        return peer == peers_.end() || !peer->second.welcomed;
      });
  if (stopping_ || stranger != command.writers.end()) {
    EndAction end;
    end.ticket = command.ticket;
    end.is_grant = true;
    end.end = End::kFailed;
    end.reason = stopping_ ? Reason::kShutdown : Reason::kPeerLost;
    end.detail = stopping_ ? "the engine is stopping" : "the producer is not connected any more";
    end.peer = stopping_ ? 0 : *stranger;
    actions_.emplace_back(std::move(end));
    return;
  }
  tell_bystanders(command);
  collect([&](Actions& out) { consumer_.grant(std::move(command), now, out); });
}

// Producer ranks that hold nothing this rank needs (MLA, replicated heads) offer all the same, and
// are told by a grant of nothing that they may free. They write nothing, so nobody waits for them;
// should the message be lost, their offer runs into its time to live.
void Engine::tell_bystanders(GrantCommand& command) {
  const auto is_bystander = [this](Session session) {
    return peers_.at(session).hello.pairs.empty();
  };
  for (const Session session : command.writers) {
    if (is_bystander(session)) {
      GrantMessage nothing;
      nothing.attempt = command.attempt;
      nothing.key = command.key;
      actions_.emplace_back(SendAction{session, std::move(nothing)});
    }
  }
  std::erase_if(command.writers, is_bystander);
}

void Engine::on(RevokeCommand command) {
  collect(
      [&](Actions& out) { consumer_.revoke(command.ticket, Reason::kRevoked, clock_.now(), out); });
}

void Engine::on(FencedOfferCommand command) {
  last_fence_ = std::max(last_fence_, command.fence);
  if (command.event != 0 || !fences_.empty()) {
    fences_.push_back(std::move(command));  // in order: a later event does not overtake
    return;
  }
  deliver(std::move(command.offer));
}

void Engine::deliver(OfferCommand offer) {
  collect([&](Actions& out) {
    if (stopping_) {
      producer_.refuse(std::move(offer), Reason::kShutdown, clock_.now(), out);
    } else {
      producer_.offer(std::move(offer), clock_.now(), out);
    }
  });
}

// Makes offers that still wait for the accelerator known without their KV, which may not be in
// memory, so that they are there to be offered anew, or to be ended like any other.
void Engine::deliver_empty(std::span<const Ticket> tickets) {
  for (auto waiting = fences_.begin(); waiting != fences_.end();) {
    if (std::ranges::find(tickets, waiting->offer.ticket) == tickets.end()) {
      ++waiting;
      continue;
    }
    waiting->offer.watermark = 0;
    waiting->offer.final = false;
    waiting->offer.new_blocks.clear();
    deliver(std::move(waiting->offer));
    waiting = fences_.erase(waiting);
  }
}

void Engine::on(RewindCommand command) {
  deliver_empty(command.tickets);
  for (const Ticket ticket : command.tickets) {
    producer_.rewind(ticket);
  }
  rewinds_.push_back(std::move(command));
  settle_rewinds();
}

// Answers the rewinds whose blocks nobody reads any more.
void Engine::settle_rewinds() {
  const auto is_settled = [this](RewindCommand& command) {
    if (std::any_of(command.tickets.begin(), command.tickets.end(),
                    [this](Ticket ticket) { return producer_.writes_in_flight(ticket); })) {
      return false;
    }
    std::erase_if(command.tickets, [this](Ticket ticket) { return !producer_.rewind(ticket); });
    events_.emplace_back(RewindResult{command.id, std::move(command.tickets)});
    return true;
  };
  std::erase_if(rewinds_, is_settled);
}

std::uint64_t Engine::fences_passed() const noexcept {
  if (fences_.empty()) {
    return last_fence_;
  }
  const std::uint64_t first = fences_.front().fence;  // 0: it has no event, and opens at once
  return first == 0 ? 0 : first - 1;
}

void Engine::on(const WithdrawCommand& command) {
  deliver_empty({&command.ticket, 1});
  const TimeNs now = clock_.now();
  collect([&](Actions& out) {
    producer_.withdraw(command.ticket, command.reason, now, out);
    if (command.has_key) {
      producer_.fail_key(command.key, command.reason, now, out);
    }
  });
}

void Engine::on(ShutdownCommand /*command*/) {
  stopping_ = true;
  const TimeNs now = clock_.now();
  for (FencedOfferCommand& waiting : std::exchange(fences_, {})) {
    deliver(std::move(waiting.offer));  // refuses it
  }
  collect([&](Actions& out) {
    producer_.withdraw_all(Reason::kShutdown, now, out);
    consumer_.revoke_all(Reason::kShutdown, now, out);
  });
  while (!connecting_.empty()) {
    end_connect(connecting_.begin()->first,
                Status::error("the engine is stopping", Reason::kShutdown));
  }
}

bool Engine::drained() const {
  return poster_.queued() == 0 && reader_.queued() == 0 && producer_.live_serves() == 0 &&
         consumer_.live() == 0;
}

void Engine::say_goodbye() {
  std::vector<Session> sessions;
  for (const auto& [session, peer] : peers_) {
    sessions.push_back(session);
  }
  for (const Session session : sessions) {
    send(session, GoodbyeMessage{});
  }
  run_actions();
}

// --- messages -----------------------------------------------------------------------------------

bool Engine::receive() {
  if (next_message_ == inbox_.size()) {
    inbox_.clear();
    next_message_ = 0;
    // An error is transient or shows up as a lost peer; there is nobody to tell here.
    (void)transport_.poll_notifications(inbox_);
  }
  const std::size_t end = std::min(inbox_.size(), next_message_ + kMessagesPerTick);
  const bool some = next_message_ < end;
  while (next_message_ < end) {
    const Notification notification = std::move(inbox_[next_message_++]);
    ++totals_.messages_received;
    if (!dispatch(notification)) {
      ++totals_.messages_dropped;
    }
    run_actions();
  }
  return some;
}

// False if the message had no effect: malformed, from a stranger, or about something that is over.
bool Engine::dispatch(const Notification& notification) {
  Result<Message> parsed = parse_message(notification.payload);
  if (!parsed.is_ok()) {
    return false;
  }
  Message& message = parsed.value();
  if (auto* hello = std::get_if<HelloMessage>(&message.body)) {
    return on_message(message.from, *hello, message.meeting, notification.peer_name);
  }
  const auto found = peers_.find(message.from);
  if (found == peers_.end() || found->second.name != notification.peer_name) {
    return false;
  }
  note_freshness(found->second, message);
  bool used = false;
  collect([&](Actions& out) { used = on_peer_message(message, out); });
  return used;
}

// What every message of a peer says of the peer itself.
void Engine::note_freshness(Peer& peer, const Message& message) {
  const TimeNs now = clock_.now();
  peer.last_heard = now;
  peer.their_stamp = std::max(peer.their_stamp, message.stamp);
  const bool ours = message.meeting != 0 && message.meeting == peer.their_meeting;
  peer.met = peer.met || ours;
  if (ours && message.echo <= static_cast<std::uint64_t>(now)) {  // no clock of ours is ahead of us
    peer.proven = std::max(peer.proven, static_cast<TimeNs>(message.echo));
  }
  note_held(peer, message);
}

bool Engine::on_peer_message(Message& message, Actions& out) {
  const TimeNs now = clock_.now();
  return std::visit(
      [&](auto& body) {
        using Body = std::decay_t<decltype(body)>;
        if constexpr (std::is_same_v<Body, HelloMessage> ||
                      std::is_same_v<Body, KeepaliveMessage>) {
          return true;
        } else if constexpr (std::is_same_v<Body, GoodbyeMessage>) {
          lose_peer(message.from, "it said goodbye", true);
          return true;
        } else if constexpr (std::is_same_v<Body, AcceptedMessage>) {
          return consumer_.on_accepted(message.from, body, now, out);
        } else if constexpr (std::is_same_v<Body, WrittenMessage>) {
          return consumer_.on_written(message.from, body, now, out);
        } else if constexpr (std::is_same_v<Body, FailedMessage>) {
          return consumer_.on_failed(message.from, body, now, out);
        } else if constexpr (std::is_same_v<Body, RevokedMessage>) {
          return consumer_.on_revoked(message.from, body, now, out);
        } else if constexpr (std::is_same_v<Body, RevokeMessage>) {
          producer_.on_revoke(message.from, body, now, out);
          return true;
        } else if constexpr (std::is_same_v<Body, ReadyMessage>) {
          return consumer_.on_ready(message.from, body, now, out);
        } else if constexpr (std::is_same_v<Body, ConfirmedMessage>) {
          return consumer_.on_confirmed(message.from, body, now, out);
        } else if constexpr (std::is_same_v<Body, RecallMessage>) {
          return consumer_.on_recall(message.from, body, now, out);
        } else if constexpr (std::is_same_v<Body, ReadDoneMessage>) {
          producer_.on_read_done(message.from, body, now, out);
          return config_.pull;
        } else if constexpr (std::is_same_v<Body, GrantMessage>) {
          return on_message(message.from, body, message.meeting, out);
        } else {
          return on_message(message.from, body);
        }
      },
      message.body);
}

bool Engine::on_message(Session from, HelloMessage& message, std::uint64_t meeting,
                        const std::string& claimed_name) {
  if (message.to != self_.session || meeting == 0 || stopping_ || is_over(from, meeting)) {
    return false;
  }
  if (const auto peer = peers_.find(from); peer != peers_.end()) {
    if (peer->second.name != claimed_name || meeting < peer->second.their_meeting) {
      return false;  // a stranger under its session, or a HELLO that was long on the way
    }
    if (peer->second.planner != nullptr && meeting != peer->second.their_meeting) {
      lose_peer(from, "it has lost us, and meets us anew", false);
    }
  }
  Result<PeerInfo> info = decode_peer_info(message.peer_info);
  if (!info.is_ok() || info.value().session != from || from == self_.session) {
    return false;
  }
  const Status status = admit(info.value(), message, meeting, claimed_name);
  if (!peers_.contains(from)) {
    return false;  // it could not even be loaded: nobody to answer
  }
  if (status.is_ok()) {
    send(from, WelcomeMessage{from, meeting});
  } else {
    send(from, RefuseMessage{from, status.message(), meeting});
  }
  return true;
}

// Makes the sender of a HELLO a consumer of ours. Repeating it changes nothing.
Status Engine::admit(const PeerInfo& info, HelloMessage& message, std::uint64_t meeting,
                     const std::string& claimed_name) {
  if (!peers_.contains(info.session)) {
    if (const auto loaded = load_peer(info, &claimed_name); !loaded.is_ok()) {
      return loaded.status();
    }
  }
  Peer& peer = peers_.at(info.session);
  peer.last_heard = clock_.now();
  if (peer.planner != nullptr) {
    return Status::ok();
  }
  if (Status status = check_compatible(self_, info); !status.is_ok()) {
    return status;
  }
  if (Status status = check_pairs(self_.regions, info.regions, message.pairs); !status.is_ok()) {
    return status;
  }
  peer.fan_out = message.fan_out;
  peer.their_meeting = meeting;
  peer.planner =
      std::make_unique<CopyPlanner>(self_.regions, info.regions, std::move(message.pairs), true);
  peer.planner->set_lists_rule(config_.lists);
  return Status::ok();
}

bool Engine::is_over(Session consumer, std::uint64_t meeting) const {
  const auto found = over_.find(consumer);
  return found != over_.end() && meeting <= found->second;
}

void Engine::remember_over(Session consumer, std::uint64_t meeting) {
  if (over_.insert_or_assign(consumer, meeting).second) {
    over_order_.push_back(consumer);
  }
  if (over_order_.size() > config_.max_peers) {
    over_.erase(over_order_.front());
    over_order_.pop_front();
  }
}

bool Engine::on_message(Session from, const WelcomeMessage& message) {
  Peer& peer = peers_.at(from);
  if (message.to != self_.session || !peer.greeted || message.meeting != peer.our_meeting) {
    return false;
  }
  peer.welcomed = true;
  settle_connects();
  return true;
}

bool Engine::on_message(Session from, const RefuseMessage& message) {
  Peer& peer = peers_.at(from);
  if (message.to != self_.session || !peer.greeted || message.meeting != peer.our_meeting) {
    return false;
  }
  if (peer.welcomed) {
    lose_peer(from, "it no longer knows us", false);
    return true;
  }
  peer.greeted = false;
  fail_connects(from,
                Status::error("the producer refuses: " + message.detail, Reason::kIncompatible));
  return true;
}

bool Engine::on_message(Session from, GrantMessage& message, std::uint64_t meeting, Actions& out) {
  const Peer& peer = peers_.at(from);
  if (stopping_) {
    return false;
  }
  if (peer.planner == nullptr || meeting != peer.their_meeting) {
    // Without effect if it is a late one; else its sender must learn that it has to meet us again.
    send(from, RefuseMessage{from, "this meeting is over", meeting});
    return false;
  }
  producer_.on_grant({from, peer.info.engine_id, peer.fan_out}, std::move(message), clock_.now(),
                     out);
  return true;
}

// --- actions ------------------------------------------------------------------------------------

void Engine::run_actions() {
  while (!actions_.empty()) {
    Action action = std::move(actions_.front());
    actions_.pop_front();
    std::visit([this](auto& body) { run(body); }, action);
  }
}

void Engine::run(SendAction& action) {
  send(action.to, action.body);
}

void Engine::send(Session to, const MessageBody& body) {
  const auto found = peers_.find(to);
  if (found == peers_.end()) {
    return;  // lost in the meantime: the state machines have been told
  }
  const Peer& peer = found->second;
  Message message{self_.session, body};
  // Before WELCOME the producer may still hold what belonged to an older meeting: till then nothing
  // but HELLO belongs to the new one.
  const bool met = peer.welcomed || std::holds_alternative<HelloMessage>(body);
  message.meeting = met ? peer.our_meeting : 0;
  message.stamp = static_cast<std::uint64_t>(clock_.now());
  const bool serves = peer.planner != nullptr;
  message.echo = peer.welcomed || serves ? peer.their_stamp : 0;
  message.serving = serves ? peer.their_meeting : 0;
  const Status status = transport_.notify(peer.name, encode_message(message));
  if (!status.is_ok()) {
    lose_peer(to, "sending failed: " + status.message(), false);
    return;
  }
  found->second.last_sent = clock_.now();
}

// Plans the copy of a job and hands it to its poster. Where that fails nothing is left of it.
Status Engine::add_copy(Poster& poster, CopyPlanner& planner, const BlockTable& local,
                        const BlockTable& remote, StateRegions states, PostJob job) {
  const TimeNs begin = clock_.now();
  job.plan = poster.take_spare_plan();
  Status planned = planner.plan_pattern(job.span, local, remote, job.plan, states);
  if (planned.is_ok()) {
    job.plan_ns = clock_.now() - begin;
    totals_.descriptors_planned += job.plan.descriptors_before;
    if (planner.wants_lists()) want_lists(job.to);
    poster.add(std::move(job));
  }
  return planned;
}

void Engine::run(PostAction& action) {
  const auto peer = peers_.find(action.to);
  const BlockTable* local = producer_.producer_blocks(action.serve);
  const BlockTable* remote = producer_.consumer_blocks(action.serve);
  PostEnded failed{action.serve, Reason::kPeerLost, "the consumer is gone", {}};
  if (peer != peers_.end() && peer->second.planner != nullptr && local != nullptr) {
    PostJob job;
    job.serve = action.serve;
    job.to = action.to;
    job.peer_name = peer->second.name;
    job.attempt = producer_.attempt_of(action.serve);
    job.span = action.span;
    const StateRegions states = action.last ? StateRegions::kCopied : StateRegions::kLeftOut;
    const Status planned =
        add_copy(poster_, *peer->second.planner, *local, *remote, states, std::move(job));
    if (planned.is_ok()) {
      return;
    }
    failed.reason = Reason::kBadRequest;
    failed.detail = planned.message();
  }
  collect([&](Actions& out) { end_post(failed, out); });
}

void Engine::run(EndAction& action) {
  if (action.end == End::kDone) {
    ++(action.is_grant ? totals_.transfers_received : totals_.transfers_sent);
  } else {
    ++totals_.transfers_failed;
  }
  events_.emplace_back(std::move(action));
}

void Engine::run(DropPeerAction& action) {
  lose_peer(action.peer, action.why, false);
}

void Engine::lose_peer(Session session, const std::string& why, bool writes_no_more) {
  const auto found = peers_.find(session);
  if (found == peers_.end()) {
    return;
  }
  const TimeNs now = clock_.now();
  // What we sent last carries the newest proof of life that it can have. Whenever that arrives, it
  // writes, or reads, for peer_timeout after it at most (rules 2 and 3).
  const TimeNs fence =
      writes_no_more ? now : found->second.last_sent + config_.peer_timeout + config_.fence_margin;
  transport_.remove_peer(found->second.name);
  wanting_lists_.erase(session);
  if (const std::uint64_t meeting = found->second.their_meeting; meeting != 0) {
    remember_over(session, found->second.met ? meeting : meeting - 1);
  }
  prepared_blocks_ -= found->second.prepared_blocks;
  peers_.erase(found);
  ++totals_.peers_lost;
  events_.emplace_back(PeerLostEvent{session, why});
  fail_connects(session, Status::error("the producer was lost: " + why, Reason::kPeerLost));
  Actions out;  // of its own: what is in collect() may lead here
  consumer_.on_peer_lost(session, fence, now, out);
  producer_.on_peer_lost(session, fence, now, out);
  std::move(out.begin(), out.end(), std::back_inserter(actions_));
}

// --- ticks --------------------------------------------------------------------------------------

// A peer that may be out of reach may be giving its blocks back (rules 2 and 3). The time is read
// anew for each post: this process may have been stopped since the last.
bool Engine::is_fresh(TimeNs proof) const {
  return proof != 0 && clock_.now() - proof < config_.peer_timeout;
}

void Engine::end_post(PostEnded& post, Actions& out) {
  producer_.on_post_ended(post.serve, post.reason, std::move(post.detail), post.stats, clock_.now(),
                          out);
}

// Posts some parts, and tells the state machine they were for of jobs that have ended.
bool Engine::step(Poster& poster, const std::function<bool(std::uint64_t, Session)>& may_post,
                  void (Engine::*end)(PostEnded&, Actions&)) {
  bool progress = false;
  for (int part = 0; part < kPartsPerTick; ++part) {
    ended_.clear();
    if (!poster.step(may_post, ended_)) {
      break;
    }
    progress = true;
    for (PostEnded& post : ended_) {
      totals_.descriptors_posted += post.stats.descriptors;
      collect([&](Actions& out) { (this->*end)(post, out); });
      run_actions();
    }
  }
  return progress;
}

bool Engine::step_posts() {
  const auto may_post = [this](ServeId serve, Session to) {
    const auto peer = peers_.find(to);
    return peer != peers_.end() && is_fresh(peer->second.proven) && producer_.may_post(serve);
  };
  return step(poster_, may_post, &Engine::end_post);
}

bool Engine::open_fences() {
  bool progress = false;
  while (!fences_.empty()) {
    FencedOfferCommand& waiting = fences_.front();
    const Result<bool> complete =
        waiting.event == 0 ? Result<bool>(true) : fence_.is_complete(waiting.event);
    if (complete.is_ok() && !complete.value()) {
      break;
    }
    FencedOfferCommand next = std::move(waiting);
    fences_.pop_front();
    if (complete.is_ok()) {
      deliver(std::move(next.offer));
    } else {  // nothing can be said of its KV
      collect([&](Actions& out) {
        producer_.refuse(std::move(next.offer), Reason::kTransportError, clock_.now(), out);
      });
    }
    run_actions();
    progress = true;
  }
  return progress;
}

void Engine::tick_peers() {
  const TimeNs now = clock_.now();
  std::vector<Session> silent;
  std::vector<Session> due;
  for (auto& [session, peer] : peers_) {
    if (now - peer.last_heard >= config_.peer_timeout) {
      silent.push_back(session);
    } else if (peer.greeted && !peer.welcomed) {
      if (now - peer.hello_sent >= config_.hello_resend) {
        peer.hello_sent = now;
        actions_.emplace_back(SendAction{session, peer.hello});
      }
    } else if (now - peer.last_sent >= config_.keepalive) {
      due.push_back(session);
    }
  }
  for (const Session session : due) {
    send(session, KeepaliveMessage{});
  }
  for (const Session session : silent) {
    lose_peer(session, "it was silent for the peer time-out", false);
  }
}

void Engine::tick_timers() {
  const TimeNs now = clock_.now();
  if (now < next_timers_) {
    return;
  }
  next_timers_ = now + kTimerInterval;
  collect([&](Actions& out) {
    consumer_.on_tick(now, out);
    producer_.on_tick(now, out);
  });
  run_actions();
  tick_peers();
  if (!connecting_.empty()) {
    settle_connects();
  }
  run_actions();
}

void Engine::want_lists(Session peer) {
  if (wanting_lists_.empty()) lists_wanted_ = clock_.now();
  wanting_lists_.insert(peer);
}

// While nothing is under way at all, nobody is kept waiting. Where something always is, such as a
// transfer that never ends, they have to be made while transfers go on.
bool Engine::has_time_for_lists() const {
  if (wanting_lists_.empty() || poster_.has_unposted() || reader_.has_unposted()) return false;
  const bool idle = poster_.queued() == 0 && reader_.queued() == 0;
  return idle || clock_.now() - lists_wanted_ >= kListsPatience;
}

// Prepares one of the lists that plans could have used, if any.
bool Engine::prepare_lists() {
  while (!wanting_lists_.empty()) {
    Peer& peer = peers_.at(*wanting_lists_.begin());
    if (prepare_lists(peer, peer.planner.get()) || prepare_lists(peer, peer.reader.get())) {
      lists_wanted_ = clock_.now();
      return true;
    }
    wanting_lists_.erase(wanting_lists_.begin());
  }
  return false;
}

bool Engine::prepare_lists(Peer& peer, CopyPlanner* planner) {
  const BlockGrid* grid = planner != nullptr ? planner->wanted_grid() : nullptr;
  if (grid == nullptr) return false;
  const std::uint64_t blocks = grid->local.size() + grid->remote.size();
  if (blocks > config_.max_prepared_blocks - prepared_blocks_) {
    planner->set_lists(0);
    return true;
  }
  const Result<ListsId> lists = transport_.prepare_lists(peer.name, *grid);
  if (lists.is_ok()) {
    peer.prepared_blocks += blocks;
    prepared_blocks_ += blocks;
  }
  planner->set_lists(lists.is_ok() ? lists.value() : 0);
  return true;
}

Activity Engine::tick() {
  bool progress = receive();
  progress = open_fences() || progress;
  progress = step_posts() || progress;
  progress = step_reads() || progress;
  tick_timers();
  if (!rewinds_.empty()) {
    settle_rewinds();
  }
  if (!progress && has_time_for_lists() && prepare_lists()) {
    return Activity::kBusy;
  }
  if (progress || poster_.queued() != 0 || reader_.queued() != 0) {
    return Activity::kBusy;
  }
  // A grant without its offer waits for our own prefill: its command will wake the thread.
  const bool waiting = consumer_.live() != 0 || producer_.live_offers() != 0 ||
                       !connecting_.empty() || !fences_.empty();
  return waiting ? Activity::kWaiting : Activity::kIdle;
}

void Engine::take_events(std::vector<EngineEvent>& out) {
  std::move(events_.begin(), events_.end(), std::back_inserter(out));
  events_.clear();
}

EngineCounters Engine::counters() const {
  EngineCounters counters = totals_;
  counters.grants_live = consumer_.live();
  counters.offers_live = producer_.live_offers();
  counters.served_live = producer_.live_serves();
  counters.handles_in_flight = poster_.handles_in_flight() + reader_.handles_in_flight();
  counters.posts_queued = poster_.queued() + reader_.queued();
  counters.fences_waiting = fences_.size();
  counters.peers = peers_.size();
  counters.bytes_written = poster_.bytes_posted();
  counters.writes_posted = poster_.handles_posted();
  counters.bytes_read = reader_.bytes_posted();
  counters.reads_posted = reader_.handles_posted();
  counters.posted_from_lists = poster_.posted_from_lists() + reader_.posted_from_lists();
  counters.prepared_blocks = prepared_blocks_;
  return counters;
}

}  // namespace kvpush
