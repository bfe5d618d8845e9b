#include <algorithm>
#include <utility>

#include "sim/apps.h"
#include "sim/world.h"

namespace kvpush::sim {

namespace {
constexpr std::uint32_t kMaxPromptTokens = 40;
constexpr DurationNs kBlockWait = 15 * kMillisecond;
constexpr int kBlockTries = 30;
}  // namespace

std::uint32_t prompt_tokens(std::uint64_t prompt) {
  return 1 + static_cast<std::uint32_t>(Random(prompt).below(kMaxPromptTokens));
}

TransferKey key_of(const std::string& id, std::uint64_t prompt) {
  TransferKey key;
  key.transfer_id = id;
  Random bytes(prompt + 1);
  for (std::uint8_t& byte : key.fingerprint.bytes) {
    byte = static_cast<std::uint8_t>(bytes.next());
  }
  return key;
}

void ProducerApp::request(const std::string& id, std::uint64_t prompt) {
  if (!alive()) {
    return;
  }
  later(0, [this, id, prompt] {
    const Ticket ticket = next_ticket_++;
    Prefill& prefill = prefills_[ticket];
    prefill.id = id;
    prefill.prompt = prompt;
    begin(ticket, kBlockTries);
    if (world_.random().chance(world_.settings().abort_per_mille)) {
      later(world_.random().between(0, 200 * kMillisecond), [this, ticket] {
        if (!world_.healed()) {
          withdraw(ticket, true);
        }
      });
    }
  });
}

void ProducerApp::begin(Ticket ticket, int tries_left) {
  const auto found = prefills_.find(ticket);
  if (found == prefills_.end() || found->second.over) {
    return;
  }
  const std::uint32_t tokens = prompt_tokens(found->second.prompt);
  found->second.blocks = allocate((tokens + block_tokens_ - 1) / block_tokens_);
  if (!found->second.blocks.empty()) {
    next_chunk(ticket);
  } else if (tries_left > 0) {
    later(kBlockWait, [this, ticket, tries_left] { begin(ticket, tries_left - 1); });
  } else {
    withdraw(ticket, world_.random().chance(500));  // rejected before it began
  }
}

void ProducerApp::next_chunk(Ticket ticket) {
  const auto found = prefills_.find(ticket);
  if (found == prefills_.end() || found->second.over) {
    return;
  }
  Random& random = world_.random();
  if (!world_.healed() && random.chance(world_.settings().preempt_per_mille)) {
    if (found->second.offered && random.chance(500)) {
      rewind(ticket);
      return;
    }
    // Its KV is computed anew, under a ticket of its own, when there is room.
    const Ticket again = next_ticket_++;
    prefills_[again].id = found->second.id;
    prefills_[again].prompt = found->second.prompt;
    withdraw(ticket, false);
    later(random.between(0, 20 * kMillisecond), [this, again] { begin(again, kBlockTries); });
    return;
  }
  Prefill& prefill = found->second;
  const std::uint32_t tokens = prompt_tokens(prefill.prompt);
  const TokenSpan span{prefill.done_tokens,
                       std::min(tokens, prefill.done_tokens + world_.settings().chunk_tokens)};
  prefill.done_tokens = span.end;
  // Preempted in its last step, say: the blocks are there, the KV of the rest is not.
  const bool is_short = !world_.healed() && random.chance(world_.settings().short_per_mille);
  prefill.over = span.end == tokens || is_short;
  const bool bad = !world_.healed() && random.chance(world_.settings().bad_grant_per_mille);
  std::vector<DeviceEvent> events;
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    events.push_back(next_event_++);
    ranks()[rank]->fence.begin(events.back());
  }
  if (!prefill.offered) {
    prefill.offered = true;
    for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
      prefill.open_ranks.insert(rank);
      world_.each_checker([&](Checker& c) { c.on_offered(ranks()[rank]->name, ticket); });
    }
  }
  ++prefill.running_chunks;
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    offer(rank, ticket, prefill, span, bad, events[rank]);
  }
  later(random.between(0, 6 * kMillisecond),
        [this, ticket, span, events] { run_chunk(ticket, span, events); });
  later(random.between(kMillisecond, 8 * kMillisecond), [this, ticket] { next_chunk(ticket); });
}

// The accelerator has computed a chunk.
void ProducerApp::run_chunk(Ticket ticket, TokenSpan span, const std::vector<DeviceEvent>& events) {
  Prefill& prefill = prefills_.at(ticket);
  fill(prefill.prompt, prefill.blocks, span);
  const bool well =
      world_.healed() || !world_.random().chance(world_.settings().fence_error_per_mille);
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    ranks()[rank]->fence.finish(events[rank], well);
  }
  --prefill.running_chunks;
  free_if_over(ticket);
}

void ProducerApp::offer(std::size_t rank, Ticket ticket, Prefill& prefill, TokenSpan span, bool bad,
                        DeviceEvent event) {
  FencedOfferCommand command;
  command.event = event;
  command.offer.ticket = ticket;
  command.offer.key = key_of(prefill.id, prefill.prompt);
  command.offer.watermark = span.end;
  command.offer.final = prefill.over;
  const std::uint32_t first = (span.begin + block_tokens_ - 1) / block_tokens_;
  const std::uint32_t last = (span.end + block_tokens_ - 1) / block_tokens_;
  GroupBlocks blocks;
  blocks.ids.assign(prefill.blocks.begin() + first,
                    prefill.over ? prefill.blocks.end() : prefill.blocks.begin() + last);
  for (const BlockId block : prefill.blocks) {
    world_.each_checker([&](Checker& c) { c.on_source_offered(ranks()[rank]->name, block); });
  }
  command.offer.new_blocks = {blocks};
  if (bad) {
    command.offer.new_blocks.emplace_back();  // a group that the engine does not have
  }
  this->command(rank, std::move(command));
}

void ProducerApp::withdraw(Ticket ticket, bool with_key) {
  const auto found = prefills_.find(ticket);
  if (found == prefills_.end()) {
    return;
  }
  found->second.over = true;
  WithdrawCommand command;
  command.ticket = ticket;
  command.reason = Reason::kProducerAborted;
  command.has_key = with_key;
  command.key = key_of(found->second.id, found->second.prompt);
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    this->command(rank, command);
  }
  free_if_over(ticket);
}

// Its blocks go to others as soon as nothing reads them; then it is computed anew.
void ProducerApp::rewind(Ticket ticket) {
  Prefill& prefill = prefills_.at(ticket);
  prefill.rewound = true;
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    prefill.rewinding.insert(rank);
  }
  for (std::size_t rank = 0; rank < ranks().size(); ++rank) {
    command(rank, RewindCommand{ticket, {ticket}});
  }
}

void ProducerApp::compute_again(Ticket ticket) {
  const auto found = prefills_.find(ticket);
  if (found == prefills_.end() || found->second.over) {
    return;
  }
  Prefill& prefill = found->second;
  if (prefill.running_chunks != 0) {  // the accelerator still writes into its blocks
    later(kBlockWait, [this, ticket] { compute_again(ticket); });
    return;
  }
  release(std::exchange(prefill.blocks, {}));
  prefill.done_tokens = 0;
  if (prefill.rewound) {
    later(world_.random().between(0, 20 * kMillisecond),
          [this, ticket] { begin(ticket, kBlockTries); });
  } else {
    withdraw(ticket, false);
  }
}

void ProducerApp::free_if_over(Ticket ticket) {
  const auto found = prefills_.find(ticket);
  if (found == prefills_.end() || !found->second.over || !found->second.open_ranks.empty() ||
      found->second.running_chunks != 0) {
    return;
  }
  const std::vector<BlockId> blocks = std::move(found->second.blocks);
  prefills_.erase(found);
  release(blocks);
}

void ProducerApp::release(const std::vector<BlockId>& blocks) {
  for (const BlockId block : blocks) {
    for (const auto& rank : ranks()) {
      const std::uint64_t bytes = std::uint64_t{rank->heads} * rank->block_tokens * 8;
      bool read = false;
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        const std::uint64_t at = rank->base + (std::uint64_t{layer} * rank->blocks + block) * bytes;
        read = read || world_.fabric().is_source_in_flight(rank->name.life, at, bytes);
      }
      world_.each_checker([&](Checker& c) { c.on_source_freed(rank->name, block, read); });
    }
  }
  free_blocks(blocks);
}

void ProducerApp::on_event(std::size_t rank, EngineEvent& event) {
  if (const auto* result = std::get_if<RewindResult>(&event)) {
    const auto found = prefills_.find(result->id);
    if (found != prefills_.end() && found->second.rewinding.erase(rank) != 0) {
      found->second.rewound = found->second.rewound && !result->rewound.empty();
      if (found->second.rewinding.empty()) {
        compute_again(result->id);
      }
    }
    return;
  }
  const auto* end = std::get_if<EndAction>(&event);
  if (end == nullptr) {
    return;
  }
  world_.log("P." + std::to_string(rank) + " offer " + std::to_string(end->ticket) +
             " ends: " + std::string(reason_name(end->reason)) + " " + end->detail);
  if (const auto found = prefills_.find(end->ticket); found != prefills_.end()) {
    found->second.open_ranks.erase(rank);
    free_if_over(end->ticket);
  }
}

void ProducerApp::report_unended() {
  for (const auto& [ticket, prefill] : prefills_) {
    world_.each_checker([&, ticket = ticket](Checker& c) {
      c.on_unended("prefill " + std::to_string(ticket) + " of " + name());
    });
  }
}

}  // namespace kvpush::sim
