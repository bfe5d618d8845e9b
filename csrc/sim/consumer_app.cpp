#include <algorithm>
#include <utility>

#include "peering.h"
#include "sim/apps.h"
#include "sim/world.h"

namespace kvpush::sim {

namespace {
constexpr DurationNs kWait = 12 * kMillisecond;
constexpr int kTries = 60;
}  // namespace

void ConsumerApp::request(const std::string& id, std::uint64_t prompt, bool must_succeed) {
  if (!alive()) {
    return;
  }
  Load load;
  load.id = id;
  load.prompt = prompt;
  load.must_succeed = must_succeed;
  ++waiting_;
  later(0, [this, load] {
    --waiting_;
    begin(load, kTries);
  });
}

void ConsumerApp::again(Load load, int tries_left) {
  if (tries_left == 0) {
    world_.count_load(false, load.must_succeed, "no connection, or no blocks");
    return;
  }
  ++waiting_;
  later(kWait, [this, load = std::move(load), tries_left] {
    --waiting_;
    begin(load, tries_left - 1);
  });
}

void ConsumerApp::begin(Load load, int tries_left) {
  if (!connected_) {
    connect();
  }
  if (connected_) {
    const std::uint32_t tokens = prompt_tokens(load.prompt);
    const std::uint32_t spare = world_.random().chance(200) ? 1 : 0;  // look-ahead slots
    load.blocks = allocate((tokens + block_tokens_ - 1) / block_tokens_ + spare);
  }
  if (load.blocks.empty()) {
    again(std::move(load), tries_left);
    return;
  }
  draw_span(load);
  load.attempt = world_.random().next() | 1U;
  const Ticket ticket = next_ticket_++;
  loads_.emplace(ticket, std::move(load));
  grant(ticket);
}

// How much of the prompt D has already, and whether it computes the last token itself.
void ConsumerApp::draw_span(Load& load) {
  Random& random = world_.random();
  const std::uint32_t tokens = prompt_tokens(load.prompt);
  std::uint32_t hit = 0;
  if (random.chance(400)) {
    hit = static_cast<std::uint32_t>(random.below(tokens + 1));
  }
  load.span = {hit, tokens};
  if (random.chance(500) && load.span.size() > 1) {
    --load.span.end;
  }
  load.first_block = random.chance(500) ? 0 : hit / block_tokens_;
  fill(load.prompt, load.blocks, {0, hit});
}

void ConsumerApp::grant(Ticket ticket) {
  Load& load = loads_.at(ticket);
  Random& random = world_.random();
  GrantCommand command;
  command.ticket = ticket;
  command.attempt = load.attempt;
  command.key = key_of(load.id, load.prompt);
  command.span = load.span;
  GroupBlocks blocks;
  blocks.first_block = load.first_block;
  blocks.ids.assign(load.blocks.begin() + load.first_block, load.blocks.end());
  const bool bad = !world_.healed() && random.chance(world_.settings().bad_grant_per_mille);
  if (bad && !blocks.ids.empty()) {
    blocks.ids.front() = 1'000'000;  // not a block of this rank
  }
  command.blocks = {blocks};
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    load.open_ranks.insert(rank);
    load.before.push_back(ranks()[rank]->memory);
    world_.each_checker(
        [&](Checker& c) { c.on_granted(ranks()[rank]->name, ticket, load.attempt, load.blocks); });
  }
  const bool aborts = random.chance(world_.settings().abort_per_mille);
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    command.writers = writers_.at(rank);
    command.deadline = ranks()[rank]->clock.now() + kLoadDeadline;
    this->command(rank, command);
  }
  if (aborts) {
    for (std::uint64_t times = 1 + random.below(2); times > 0; --times) {
      later(random.between(0, 250 * kMillisecond), [this, ticket] { abort(ticket); });
    }
  }
}

void ConsumerApp::abort(Ticket ticket) {
  const auto found = loads_.find(ticket);
  if (found == loads_.end() || found->second.must_succeed || world_.healed()) {
    return;
  }
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    command(rank, RevokeCommand{ticket});
  }
}

void ConsumerApp::on_event(std::size_t rank, EngineEvent& event) {
  if (const auto* end = std::get_if<EndAction>(&event)) {
    on_end(rank, *end);
  } else if (const auto* result = std::get_if<ConnectResult>(&event)) {
    on_connected(rank, *result);
  } else if (const auto* lost = std::get_if<PeerLostEvent>(&event)) {
    world_.log(name() + "." + std::to_string(rank) + " has lost a peer: " + lost->why);
    connected_ = false;
    connect_failed_ = true;
  }
}

void ConsumerApp::on_end(std::size_t rank, const EndAction& end) {
  world_.log(name() + "." + std::to_string(rank) + " grant " + std::to_string(end.ticket) +
             " ends: " + std::string(reason_name(end.reason)) + " " + end.detail);
  const auto found = loads_.find(end.ticket);
  if (found == loads_.end()) {
    return;  // EndsAreReportedOnce has seen it
  }
  Load& load = found->second;
  load.open_ranks.erase(rank);
  if (end.end != End::kDone) {
    load.failed = true;
    load.why = std::string(reason_name(end.reason)) + " " + end.detail;
  }
  if (load.open_ranks.empty()) {
    finish(end.ticket);
  }
}

void ConsumerApp::finish(Ticket ticket) {
  const Load load = std::move(loads_.at(ticket));
  loads_.erase(ticket);
  if (!load.failed) {
    check_words(ticket, load);
  }
  free_blocks(load.blocks);
  world_.count_load(!load.failed, load.must_succeed, load.why);
  const Settings& settings = world_.settings();
  if (load.failed && !world_.healed() && world_.random().chance(settings.retry_per_mille)) {
    world_.log(name() + " tries " + load.id + " again");
    Load retry;
    retry.id = load.id;
    retry.prompt = load.prompt;
    again(std::move(retry), kTries);
  }
}

// The span holds the prompt's KV, and what lies beside it in these blocks is as it was.
void ConsumerApp::check_words(Ticket ticket, const Load& load) {
  for (std::size_t r = 0; r < ranks().size(); ++r) {
    Rank& rank = *ranks()[r];
    const auto tokens = static_cast<std::uint32_t>(load.blocks.size()) * block_tokens_;
    for (std::uint32_t token = 0; token < tokens; ++token) {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        for (std::uint32_t h = rank.first_head; h < rank.first_head + rank.heads; ++h) {
          const std::uint64_t& word =
              rank.word(layer, load.blocks[token / block_tokens_], h, token % block_tokens_);
          const bool inside = load.span.begin <= token && token < load.span.end;
          const auto place = static_cast<std::size_t>(&word - rank.memory.data());
          const std::uint64_t expected =
              inside ? kv_word(load.prompt, layer, h, token) : load.before[r][place];
          world_.each_checker([&](Checker& c) { c.on_word(rank.name, ticket, expected, word); });
        }
      }
    }
  }
}

// Asks the producer's side channel, and meets the ranks that each rank needs.
void ConsumerApp::connect() {
  if (!connecting_.empty() || !world_.producer().alive()) {
    return;
  }
  const std::vector<PeerInfo> producers = world_.producer().peer_infos();
  const std::vector<PeerInfo> own = peer_infos();
  writers_.assign(ranks().size(), {});
  connect_failed_ = false;
  ++connect_id_;
  std::vector<ConnectCommand> commands;
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    ConnectCommand command;
    command.id = connect_id_;
    command.targets = find_targets(producers, own, rank).value();
    command.deadline = ranks()[rank]->clock.now() + kConnectTime;
    for (const PeerTarget& target : command.targets) {
      writers_[rank].push_back(target.info.session);
    }
    connecting_.insert(rank);
    commands.push_back(std::move(command));
  }
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    command(rank, std::move(commands[rank]));
  }
}

void ConsumerApp::on_connected(std::size_t rank, const ConnectResult& result) {
  if (result.id != connect_id_) {
    return;
  }
  world_.log(name() + "." + std::to_string(rank) +
             " connect: " + (result.status.is_ok() ? "ok" : result.status.message()));
  connect_failed_ = connect_failed_ || !result.status.is_ok();
  connecting_.erase(rank);
  connected_ = connecting_.empty() && !connect_failed_;
}

void ConsumerApp::on_death() {
  loads_.clear();
  waiting_ = 0;
  connecting_.clear();
  connected_ = false;
}

void ConsumerApp::report_unended() {
  for (const auto& [ticket, load] : loads_) {
    world_.each_checker([&, ticket = ticket](Checker& c) {
      c.on_unended("load " + std::to_string(ticket) + " of " + name());
    });
  }
}

}  // namespace kvpush::sim
