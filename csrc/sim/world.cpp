#include "sim/world.h"

#include <cstdio>
#include <utility>

#include "message.h"
#include "sim/apps.h"

namespace kvpush::sim {

namespace {

constexpr DurationNs kLookAtRest = 10 * kMillisecond;
constexpr std::uint64_t kProbePrompt = 1'000'003;

// Machines draw from the same numbers as the settings, so each world has its own from its seed.
Random random_of(std::uint64_t seed) {
  return Random(seed * 0x2545F4914F6CDD1DU + 1);
}

// Of the WRITE that carries these bytes; 0 if they are none.
Attempt written_attempt(const Bytes& payload) {
  const Result<Message> message = parse_message(payload);
  const auto* written =
      message.is_ok() ? std::get_if<WrittenMessage>(&message.value().body) : nullptr;
  return written == nullptr ? 0 : written->attempt;
}

template <typename Tell>
void each_block(const Rank& rank, std::uint64_t address, std::uint64_t length, const Tell& tell) {
  const BlockId last = rank.block_at(address + length - 1);
  for (BlockId block = rank.block_at(address); block <= last; ++block) {
    tell(block);
  }
}

}  // namespace

World::World(std::uint64_t seed, bool verbose, bool pull)
    : random_(random_of(seed)),
      settings_(draw_settings(random_)),
      fabric_(queue_, random_.fork(), settings_.fabric),
      verbose_(verbose),
      checkers_(make_checkers()) {
  settings_.pull = pull;
  settings_.engine.pull = pull;
  watch_transfers();
  watch_messages();
  producer_ = std::make_unique<ProducerApp>(*this, "P", settings_.producer_ranks,
                                            settings_.producer_block_tokens);
  producer_->start();
  for (std::uint32_t i = 0; i < settings_.consumers; ++i) {
    consumers_.push_back(std::make_unique<ConsumerApp>(
        *this, "D" + std::to_string(i), settings_.consumer_ranks, settings_.consumer_block_tokens));
    consumers_.back()->start();
  }
  stranger_ = fabric_.attach("stranger");
}

World::~World() {
  // Machines end before the fabric that their transports belong to.
  stranger_.reset();
  consumers_.clear();
  producer_.reset();
}

void World::log(const std::string& line) {
  if (verbose_) {
    std::printf("%10.3f ms  %s\n", static_cast<double>(queue_.now() - kSecond) / kMillisecond,
                line.c_str());
  }
}

void World::each_checker(const std::function<void(Checker&)>& tell) {
  for (const auto& checker : checkers_) {
    tell(*checker);
  }
}

void World::count_load(bool done, bool must_succeed, const std::string& why) {
  ++(done ? result_.loads_done : result_.loads_failed);
  each_checker([&](Checker& checker) { checker.on_load_ended(must_succeed, done, why); });
}

void World::watch_transfers() {
  fabric_.on_slice = [this](const AppliedSlice& slice) {
    if (slice.direction == CopyDirection::kRead) {
      tell_read(slice.id, slice.from, slice.to, slice.run, false);
    } else if (Rank* rank = consumer_rank(slice.to); rank != nullptr) {
      const Attempt attempt = written_attempt(*slice.payload);
      each_block(*rank, slice.run.remote_address, slice.run.length, [&](BlockId block) {
        each_checker([&](Checker& checker) { checker.on_slice(rank->name, attempt, block); });
      });
    }
  };
  fabric_.on_posted = [this](const Posted& posted) {
    if (posted.direction == CopyDirection::kRead) {
      for (const CopyRun& run : *posted.runs) {
        tell_read(posted.id, posted.from, posted.to, run, true);
      }
    } else if (const Attempt attempt = written_attempt(*posted.payload); attempt != 0) {
      each_checker([&](Checker& checker) { checker.on_posted(posted.from, posted.to, attempt); });
    }
  };
}

Rank* World::consumer_rank(LifeId life) {
  for (const auto& consumer : consumers_) {
    if (Rank* rank = consumer->rank_of(life); rank != nullptr) {
      return rank;
    }
  }
  return nullptr;
}

// A READ is posted, or a piece of it is done: what it touches on both sides.
void World::tell_read(HandleId handle, LifeId reader, LifeId source, const CopyRun& run,
                      bool posted) {
  if (Rank* rank = consumer_rank(reader); rank != nullptr) {
    each_block(*rank, run.local_address, run.length, [&](BlockId block) {
      each_checker([&](Checker& checker) { checker.on_read(rank->name, handle, block, posted); });
    });
  }
  if (Rank* rank = producer_->rank_of(source); rank != nullptr) {
    each_block(*rank, run.remote_address, run.length, [&](BlockId block) {
      each_checker(
          [&](Checker& checker) { checker.on_read_from(rank->name, handle, block, posted); });
    });
  }
}

void World::watch_messages() {
  fabric_.on_delivered = [this](LifeId from, LifeId to, const Bytes& payload) {
    const Result<Message> message = parse_message(payload);
    if (!message.is_ok() || stranger_ == nullptr || from == stranger_->life()) {
      return;
    }
    if (const auto* revoke = std::get_if<RevokeMessage>(&message.value().body)) {
      each_checker(
          [&](Checker& checker) { checker.on_revoke_delivered(to, from, revoke->attempt); });
    }
  };
}

// --- what happens -------------------------------------------------------------------------------

void World::send_request(std::size_t consumer, const std::string& id, std::uint64_t prompt,
                         bool must_succeed) {
  const bool no_prefill = !must_succeed && random_.chance(settings_.missing_leg_per_mille);
  const bool no_load = !must_succeed && random_.chance(settings_.missing_leg_per_mille);
  const DurationNs prefill = random_.between(0, 100 * kMillisecond);
  const DurationNs load = random_.between(0, 100 * kMillisecond);
  if (!no_prefill) {
    queue_.after(prefill, [this, id, prompt] { producer_->request(id, prompt); });
  }
  if (!no_load) {
    queue_.after(load, [this, consumer, id, prompt, must_succeed] {
      consumers_[consumer]->request(id, prompt, must_succeed);
    });
  }
}

void World::plan_requests() {
  for (std::uint32_t i = 0; i < settings_.requests; ++i) {
    const std::uint64_t id = settings_.clean ? i : random_.below(settings_.transfer_ids);
    const std::uint64_t prompt = random_.below(settings_.prompts);
    const std::size_t consumer = random_.below(consumers_.size());
    queue_.after(random_.between(0, kActiveTime * 2 / 3), [this, id, prompt, consumer] {
      send_request(consumer, "t" + std::to_string(id), prompt, settings_.clean);
    });
  }
}

Machine& World::any_machine() {
  const std::size_t pick = random_.below(consumers_.size() + 1);
  return pick == 0 ? static_cast<Machine&>(*producer_) : *consumers_[pick - 1];
}

void World::plan_troubles() {
  for (std::uint32_t i = 0; i < settings_.stalls; ++i) {
    queue_.after(random_.between(0, kActiveTime), [this] {
      if (Machine& machine = any_machine(); machine.alive()) {
        machine.stall(random_.between(kMillisecond, 3 * settings_.engine.peer_timeout));
      }
    });
  }
  for (std::uint32_t i = 0; i < settings_.crashes; ++i) {
    queue_.after(random_.between(0, kActiveTime), [this] {
      Machine& machine = any_machine();
      if (!machine.alive()) {
        return;
      }
      machine.die();
      queue_.after(random_.between(0, 2 * settings_.engine.peer_timeout), [&machine] {
        if (!machine.alive()) {
          machine.start();
        }
      });
    });
  }
  for (std::uint32_t i = 0; i < settings_.strangers; ++i) {
    queue_.after(random_.between(0, kActiveTime), [this] { stranger_speaks(); });
  }
}

// Somebody who is no peer sends bytes, or claims to be one.
void World::stranger_speaks() {
  Machine& target = any_machine();
  Machine& claimed = any_machine();
  if (!target.alive() || !claimed.alive()) {
    return;
  }
  const Rank& to = *target.ranks().front();
  const Rank& from = *claimed.ranks().front();
  const Result<std::string> name = stranger_->add_peer(to.info.transport_metadata);
  if (!name.is_ok()) {
    return;
  }
  Message message{from.info.session, KeepaliveMessage{}};
  message.meeting = 1 + random_.below(3);
  message.echo = static_cast<std::uint64_t>(to.clock.now());
  const Attempt attempt = random_.next() | 1U;
  switch (random_.below(5)) {
    case 0: {
      HelloMessage hello;
      hello.to = to.info.session;
      hello.peer_info = encode_peer_info(from.info);
      message.body = hello;
      break;
    }
    case 1:
      message.body = GoodbyeMessage{};
      break;
    case 2:
      message.body = RevokeMessage{attempt};
      break;
    case 3:
      message.body = WelcomeMessage{to.info.session, message.meeting};
      break;
    default:
      break;
  }
  Bytes bytes = encode_message(message);
  if (random_.chance(300)) {
    bytes[random_.below(bytes.size())] = static_cast<std::byte>(random_.next());
  }
  (void)stranger_->notify(name.value(), bytes);
}

// --- the run ------------------------------------------------------------------------------------

void World::heal() {
  log("healed");
  healed_ = true;
  fabric_.heal();
  if (!producer_->alive()) {
    producer_->start();
  }
  for (const auto& consumer : consumers_) {
    if (!consumer->alive()) {
      consumer->start();
    }
  }
}

bool World::run_until_rest(TimeNs limit) {
  const auto at_rest = [this] {
    bool rest = producer_->is_at_rest();
    const auto look = [&rest](Machine& machine) {
      rest = rest && !machine.is_stalled();  // what waits for it to go on is not seen yet
      for (const auto& rank : machine.ranks()) {
        const EngineCounters c = rank->engine->counters();
        rest =
            rest &&
            c.grants_live + c.offers_live + c.served_live + c.posts_queued + c.fences_waiting == 0;
      }
    };
    look(*producer_);
    for (const auto& consumer : consumers_) {
      rest = rest && consumer->is_at_rest();
      look(*consumer);
    }
    return rest;
  };
  while (queue_.now() < limit) {
    queue_.run_until(queue_.now() + kLookAtRest);
    if (at_rest()) {
      return true;
    }
  }
  return false;
}

RunResult World::run() {
  plan_requests();
  plan_troubles();
  queue_.run_until(queue_.now() + kActiveTime);
  heal();
  // Stops that began before may last on; then every wait has its bound.
  const DurationNs bound = 3 * settings_.engine.peer_timeout + healing_bound(settings_.engine);
  if (run_until_rest(queue_.now() + bound)) {
    // What nobody has noticed yet is noticed, and what is remembered is forgotten.
    const DurationNs quiet =
        settings_.engine.producer.grant_ttl * 11 / 10 + 2 * settings_.engine.peer_timeout;
    queue_.run_until(queue_.now() + quiet);
    for (std::size_t i = 0; i < consumers_.size(); ++i) {
      send_request(i, "probe" + std::to_string(i), kProbePrompt + i, true);
      queue_.run_until(queue_.now() + 110 * kMillisecond);
      run_until_rest(queue_.now() + bound);
    }
  }
  producer_->report_unended();
  producer_->report_rest();
  for (const auto& consumer : consumers_) {
    consumer->report_unended();
    consumer->report_rest();
  }
  for (const auto& checker : checkers_) {
    for (const std::string& violation : checker->violations()) {
      result_.violations.push_back(violation);
    }
  }
  result_.posted_from_lists = fabric_.posted_from_lists();
  result_.hash = fabric_.run_hash() * 31 + result_.loads_done * 7 + result_.loads_failed;
  return result_;
}

}  // namespace kvpush::sim
