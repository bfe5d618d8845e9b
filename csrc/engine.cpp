#include "engine.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace kvpush {

namespace {
// Timers are for seconds: looking at every table 200 times a second is exact enough and costs little.
constexpr DurationNs kTimerInterval = 5 * kMillisecond;
// Parts posted in one tick before messages get a turn again.
constexpr int kPartsPerTick = 4;
}  // namespace

Engine::Engine(Transport& transport, const Clock& clock, DeviceFence& fence, EngineConfig config,
               PeerInfo self)
    : transport_(transport),
      clock_(clock),
      fence_(fence),
      config_(config),
      self_(std::move(self)),
      consumer_(config.consumer),
      producer_(config.producer),
      poster_(transport, clock, self_.session, config.poster) {
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
    end_connect(id, false, Status::error("the engine is stopping"));
    return;
  }
  ConnectCommand& placed = connecting_.emplace(id, std::move(command)).first->second;
  for (PeerTarget& target : placed.targets) {
    if (Status status = greet(target); !status.is_ok()) {
      end_connect(id, false, std::move(status));
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
    if (peers_.size() >= config_.max_peers) {
      return Status::error("too many peers: " + std::to_string(peers_.size()));
    }
    Result<std::string> name = transport_.add_peer(target.info.transport_metadata);
    if (!name.is_ok()) {
      return name.status();
    }
    peer = &peers_[session];
    peer->name = name.value();
    peer->info = target.info;
    peer->last_heard = clock_.now();
  }
  if (peer->greeted) {
    return Status::ok();
  }
  peer->greeted = true;
  peer->hello.to = session;
  peer->hello.peer_info = encode_peer_info(self_);
  peer->hello.pairs = target.pairs;
  peer->hello.fan_out = target.fan_out;
  peer->hello_sent = clock_.now();
  send(session, peer->hello);
  return Status::ok();
}

void Engine::end_connect(std::uint64_t id, bool timed_out, Status status) {
  connecting_.erase(id);
  events_.emplace_back(ConnectResult{id, timed_out, std::move(status)});
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
    end_connect(id, !silent.empty(),
                silent.empty() ? Status::ok()
                               : Status::error("no answer to HELLO from " + silent +
                                               "; is it alive, and can the transport reach it?"));
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
    end_connect(id, false, why);
  }
}

void Engine::on(GrantCommand command) {
  const TimeNs now = clock_.now();
  const auto stranger = std::find_if(
      command.writers.begin(), command.writers.end(), [this](Session session) {
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
  scratch_.clear();
  consumer_.grant(std::move(command), now, scratch_);
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
}

void Engine::on(RevokeCommand command) {
  scratch_.clear();
  consumer_.revoke(command.ticket, Reason::kRevoked, clock_.now(), scratch_);
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
}

void Engine::on(FencedOfferCommand command) {
  if (command.event != 0 || !fences_.empty()) {
    fences_.push_back(std::move(command));  // in order: a later event does not overtake
    return;
  }
  deliver(std::move(command.offer));
}

void Engine::deliver(OfferCommand offer) {
  const Ticket ticket = offer.ticket;
  scratch_.clear();
  producer_.offer(std::move(offer), clock_.now(), scratch_);
  if (stopping_) {
    producer_.withdraw(ticket, Reason::kShutdown, clock_.now(), scratch_);
  }
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
}

void Engine::on(WithdrawCommand command) {
  // Offers that still wait for the accelerator are not in memory: they are made known as empty, so
  // that the withdrawal ends them like any other.
  for (auto waiting = fences_.begin(); waiting != fences_.end();) {
    if (waiting->offer.ticket != command.ticket) {
      ++waiting;
      continue;
    }
    waiting->offer.watermark = 0;
    waiting->offer.final = false;
    deliver(std::move(waiting->offer));
    waiting = fences_.erase(waiting);
  }
  const TimeNs now = clock_.now();
  scratch_.clear();
  producer_.withdraw(command.ticket, command.reason, now, scratch_);
  if (command.has_key) {
    producer_.fail_key(command.key, command.reason, now, scratch_);
  }
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
}

void Engine::on(ShutdownCommand /*command*/) {
  stopping_ = true;
  const TimeNs now = clock_.now();
  for (FencedOfferCommand& waiting : std::exchange(fences_, {})) {
    waiting.offer.watermark = 0;
    waiting.offer.final = false;
    deliver(std::move(waiting.offer));
  }
  scratch_.clear();
  producer_.withdraw_all(Reason::kShutdown, now, scratch_);
  consumer_.revoke_all(Reason::kShutdown, now, scratch_);
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
  while (!connecting_.empty()) {
    end_connect(connecting_.begin()->first, false, Status::error("the engine is stopping"));
  }
}

bool Engine::drained() const {
  return poster_.queued() == 0 && producer_.live_serves() == 0 && consumer_.live() == 0;
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
  inbox_.clear();
  // An error is transient or shows up as a lost peer; there is nobody to tell here.
  (void)transport_.poll_notifications(inbox_);
  for (const Notification& notification : inbox_) {
    ++totals_.messages_received;
    if (!dispatch(notification)) {
      ++totals_.messages_dropped;
    }
    run_actions();
  }
  return !inbox_.empty();
}

// False if the message had no effect: malformed, from a stranger, or about something that is over.
bool Engine::dispatch(const Notification& notification) {
  Result<Message> parsed = parse_message(notification.payload);
  if (!parsed.is_ok()) {
    return false;
  }
  Message& message = parsed.value();
  if (auto* hello = std::get_if<HelloMessage>(&message.body)) {
    return on_message(message.from, *hello, notification.peer_name);
  }
  const auto found = peers_.find(message.from);
  if (found == peers_.end() || found->second.name != notification.peer_name) {
    return false;
  }
  const TimeNs now = clock_.now();
  found->second.last_heard = now;
  scratch_.clear();
  const bool used = std::visit(
      [&](auto& body) {
        using Body = std::decay_t<decltype(body)>;
        if constexpr (std::is_same_v<Body, HelloMessage> || std::is_same_v<Body, KeepaliveMessage>) {
          return true;
        } else if constexpr (std::is_same_v<Body, GoodbyeMessage>) {
          lose_peer(message.from, "it said goodbye", true);
          return true;
        } else if constexpr (std::is_same_v<Body, AcceptedMessage>) {
          return consumer_.on_accepted(message.from, body, now, scratch_);
        } else if constexpr (std::is_same_v<Body, WrittenMessage>) {
          return consumer_.on_written(message.from, body, now, scratch_);
        } else if constexpr (std::is_same_v<Body, FailedMessage>) {
          return consumer_.on_failed(message.from, body, now, scratch_);
        } else if constexpr (std::is_same_v<Body, RevokedMessage>) {
          return consumer_.on_revoked(message.from, body, now, scratch_);
        } else if constexpr (std::is_same_v<Body, RevokeMessage>) {
          producer_.on_revoke(message.from, body, now, scratch_);
          return true;
        } else {
          return on_message(message.from, body);
        }
      },
      message.body);
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
  scratch_.clear();
  return used;
}

bool Engine::on_message(Session from, HelloMessage& message, const std::string& claimed_name) {
  if (message.to != self_.session || stopping_) {
    return false;
  }
  Result<PeerInfo> info = decode_peer_info(message.peer_info);
  if (!info.is_ok() || info.value().session != from || from == self_.session) {
    return false;
  }
  const Status status = admit(info.value(), message, claimed_name);
  if (!peers_.contains(from)) {
    return false;  // it could not even be loaded: nobody to answer
  }
  if (status.is_ok()) {
    send(from, WelcomeMessage{from});
  } else {
    send(from, RefuseMessage{from, status.message()});
  }
  return true;
}

// Makes the sender of a HELLO a consumer of ours. Repeating it changes nothing.
Status Engine::admit(const PeerInfo& info, HelloMessage& message, const std::string& claimed_name) {
  auto found = peers_.find(info.session);
  if (found == peers_.end()) {
    if (peers_.size() >= config_.max_peers) {
      return Status::error("too many peers");
    }
    Result<std::string> name = transport_.add_peer(info.transport_metadata);
    if (!name.is_ok()) {
      return name.status();
    }
    if (name.value() != claimed_name) {
      transport_.remove_peer(name.value());
      return Status::error("the sender is not who its metadata says");
    }
    found = peers_.emplace(info.session, Peer{}).first;
    found->second.name = name.value();
    found->second.info = info;
  }
  Peer& peer = found->second;
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
  peer.planner = std::make_unique<CopyPlanner>(self_.regions, info.regions,
                                               std::move(message.pairs), true);
  return Status::ok();
}

bool Engine::on_message(Session from, const WelcomeMessage& message) {
  Peer& peer = peers_.at(from);
  if (message.to != self_.session || !peer.greeted) {
    return false;
  }
  peer.welcomed = true;
  settle_connects();
  return true;
}

bool Engine::on_message(Session from, const RefuseMessage& message) {
  Peer& peer = peers_.at(from);
  if (message.to != self_.session || !peer.greeted || peer.welcomed) {
    return false;
  }
  peer.greeted = false;
  fail_connects(from, Status::error("the producer refuses: " + message.detail));
  return true;
}

bool Engine::on_message(Session from, GrantMessage& message) {
  const Peer& peer = peers_.at(from);
  if (peer.planner == nullptr || stopping_) {
    return false;
  }
  producer_.on_grant({from, peer.info.engine_id, peer.fan_out}, std::move(message), clock_.now(),
                     scratch_);
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

void Engine::run(SendAction& action) { send(action.to, action.body); }

void Engine::send(Session to, const MessageBody& body) {
  const auto found = peers_.find(to);
  if (found == peers_.end()) {
    return;  // lost in the meantime: the state machines have been told
  }
  const Status status = transport_.notify(found->second.name, encode_message({self_.session, body}));
  if (!status.is_ok()) {
    lose_peer(to, "sending failed: " + status.message(), false);
    return;
  }
  found->second.last_sent = clock_.now();
}

void Engine::run(PostAction& action) {
  const auto peer = peers_.find(action.to);
  const BlockTable* local = producer_.producer_blocks(action.serve);
  const BlockTable* remote = producer_.consumer_blocks(action.serve);
  const TimeNs begin = clock_.now();
  PostEnded failed{action.serve, Reason::kPeerLost, "the consumer is gone", {}};
  if (peer != peers_.end() && peer->second.planner != nullptr && local != nullptr) {
    PostJob job;
    job.plan = poster_.take_spare_plan();
    const StateRegions states = action.last ? StateRegions::kCopied : StateRegions::kLeftOut;
    const Status planned =
        peer->second.planner->plan(action.span, *local, *remote, job.plan, states);
    if (planned.is_ok()) {
      job.serve = action.serve;
      job.to = action.to;
      job.peer_name = peer->second.name;
      job.attempt = producer_.attempt_of(action.serve);
      job.span = action.span;
      job.plan_ns = clock_.now() - begin;
      totals_.descriptors_planned += job.plan.descriptors_before;
      poster_.add(std::move(job));
      return;
    }
    failed.reason = Reason::kBadRequest;
    failed.detail = planned.message();
  }
  scratch_.clear();
  producer_.on_post_ended(action.serve, failed.reason, failed.detail, failed.stats, clock_.now(),
                          scratch_);
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
}

void Engine::run(EndAction& action) {
  if (action.end == End::kDone) {
    ++(action.is_grant ? totals_.transfers_received : totals_.transfers_sent);
  } else {
    ++totals_.transfers_failed;
  }
  events_.emplace_back(std::move(action));
}

void Engine::run(DropPeerAction& action) { lose_peer(action.peer, action.why, false); }

void Engine::lose_peer(Session session, const std::string& why, bool writes_no_more) {
  const auto found = peers_.find(session);
  if (found == peers_.end()) {
    return;
  }
  const TimeNs now = clock_.now();
  // What we sent last may have been heard now at the latest; from then on it writes for
  // peer_timeout at most (rule 2).
  const TimeNs fence =
      writes_no_more ? now : found->second.last_sent + config_.peer_timeout + config_.fence_margin;
  transport_.remove_peer(found->second.name);
  peers_.erase(found);
  ++totals_.peers_lost;
  events_.emplace_back(PeerLostEvent{session, why});
  fail_connects(session, Status::error("the producer was lost: " + why));
  Actions out;
  consumer_.on_peer_lost(session, fence, now, out);
  producer_.on_peer_lost(session, now, out);
  std::move(out.begin(), out.end(), std::back_inserter(actions_));
}

// --- ticks --------------------------------------------------------------------------------------

bool Engine::step_posts() {
  const TimeNs now = clock_.now();
  const auto may_post = [this, now](ServeId serve, Session to) {
    const auto peer = peers_.find(to);
    // Rule 2, the producer's part: a consumer we have not heard of may be giving its blocks back.
    return peer != peers_.end() && now - peer->second.last_heard < config_.peer_timeout &&
           producer_.may_post(serve);
  };
  bool progress = false;
  for (int part = 0; part < kPartsPerTick; ++part) {
    ended_.clear();
    if (!poster_.step(may_post, ended_)) {
      break;
    }
    progress = true;
    for (PostEnded& post : ended_) {
      scratch_.clear();
      producer_.on_post_ended(post.serve, post.reason, std::move(post.detail), post.stats,
                              clock_.now(), scratch_);
      totals_.descriptors_posted += post.stats.descriptors;
      std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
      run_actions();
    }
  }
  return progress;
}

bool Engine::open_fences() {
  bool progress = false;
  while (!fences_.empty()) {
    FencedOfferCommand& waiting = fences_.front();
    const Result<bool> complete = waiting.event == 0 ? Result<bool>(true)
                                                     : fence_.is_complete(waiting.event);
    if (complete.is_ok() && !complete.value()) {
      break;
    }
    FencedOfferCommand next = std::move(waiting);
    fences_.pop_front();
    const Ticket ticket = next.offer.ticket;
    if (!complete.is_ok()) {
      next.offer.watermark = 0;  // nothing can be said of its KV
      next.offer.final = false;
    }
    deliver(std::move(next.offer));
    if (!complete.is_ok()) {
      scratch_.clear();
      producer_.withdraw(ticket, Reason::kTransportError, clock_.now(), scratch_);
      std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
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
  scratch_.clear();
  consumer_.on_tick(now, scratch_);
  producer_.on_tick(now, scratch_);
  std::move(scratch_.begin(), scratch_.end(), std::back_inserter(actions_));
  run_actions();
  tick_peers();
  if (!connecting_.empty()) {
    settle_connects();
  }
  run_actions();
}

Activity Engine::tick() {
  bool progress = receive();
  progress = open_fences() || progress;
  progress = step_posts() || progress;
  tick_timers();
  if (progress || poster_.queued() != 0) {
    return Activity::kBusy;
  }
  const bool waiting = consumer_.live() != 0 || producer_.live_serves() != 0 ||
                       producer_.live_offers() != 0 || !connecting_.empty() || !fences_.empty();
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
  counters.handles_in_flight = poster_.handles_in_flight();
  counters.posts_queued = poster_.queued();
  counters.fences_waiting = fences_.size();
  counters.peers = peers_.size();
  counters.bytes_written = poster_.bytes_posted();
  counters.writes_posted = poster_.handles_posted();
  return counters;
}

}  // namespace kvpush
