#include "sim/machine.h"

#include <algorithm>
#include <utility>

#include "sim/world.h"

namespace kvpush::sim {

namespace {

constexpr std::uint64_t kWordBytes = sizeof(std::uint64_t);

std::vector<Region> regions_of(const Rank& rank) {
  std::vector<Region> regions;
  const std::uint64_t head_stride = rank.block_tokens * kWordBytes;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    Region region;
    region.layer = "layer" + std::to_string(layer);
    region.dtype = "u64";
    region.block_stride = rank.heads * head_stride;
    region.base = rank.base + std::uint64_t{layer} * rank.blocks * region.block_stride;
    region.num_blocks = rank.blocks;
    region.tokens_per_block = rank.block_tokens;
    region.tokens_per_page = rank.block_tokens;
    region.page_stride = region.block_stride;
    region.token_stride = kWordBytes;
    region.component_stride = region.block_stride;
    region.first_head = rank.first_head;
    region.heads = rank.heads;
    region.total_heads = kTotalHeads;
    region.head_stride = head_stride;
    region.element_bytes = kWordBytes;
    regions.push_back(region);
  }
  return regions;
}

// A clock may be off by this much of its rate: crystals by 0.01 %, so there is room.
constexpr std::int64_t kMaxSkewPpm = 20'000;

SimClock draw_clock(World& world) {
  const DurationNs offset = world.random().between(0, kSecond);
  return {world.queue(), offset, world.random().between(-kMaxSkewPpm, kMaxSkewPpm)};
}

}  // namespace

std::uint64_t kv_word(std::uint64_t prompt, std::uint32_t layer, std::uint32_t head,
                      std::uint32_t token) {
  return Random(((prompt * 31 + layer) * 31 + head) * 65'536 + token).next();
}

Result<bool> SimFence::is_complete(DeviceEvent event) {
  const auto found = events_.find(event);
  KVPUSH_CHECK(found != events_.end(), "an event is asked about until it was seen complete");
  const State state = found->second;
  if (state != State::kRunning) {
    events_.erase(found);
  }
  if (state == State::kFailed) {
    return Status::error("the device reports an error");
  }
  return state == State::kComplete;
}

// --- one rank -----------------------------------------------------------------------------------

Rank::Rank(World& world, std::string agent, std::string label, std::uint32_t index,
           std::uint32_t ranks, std::uint32_t block_tokens_in, const std::string& engine_id)
    : first_head(index * kTotalHeads / ranks),
      heads(kTotalHeads / ranks),
      block_tokens(block_tokens_in),
      blocks(world.settings().pool_blocks),
      base(0),
      memory(std::size_t{kLayers} * blocks * heads * block_tokens),
      clock(draw_clock(world)),
      transport(world.fabric().attach(std::move(agent))) {
  name = {transport->life(), std::move(label)};
  base = (name.life + 1) << 32U;
  const std::uint64_t bytes = memory.size() * kWordBytes;
  transport->map_memory(base, reinterpret_cast<std::byte*>(memory.data()), bytes);
  const MemoryRange range{base, bytes, MemoryKind::kHost, 0};
  KVPUSH_CHECK(transport->register_memory({&range, 1}).is_ok(), "the range is sound");
  info.session = world.random().next() | 1U;
  info.engine_id = engine_id;
  info.tp_rank = index;
  info.tp_size = ranks;
  info.facts = {{"model", "simulated"}};
  info.regions = regions_of(*this);
  info.transport_metadata = transport->local_metadata().value();
  engine = std::make_unique<Engine>(*transport, clock, fence, world.settings().engine, info);
}

std::uint64_t& Rank::word(std::uint32_t layer, BlockId block, std::uint32_t head,
                          std::uint32_t token) {
  const std::uint64_t place = std::uint64_t{layer} * blocks + block;
  return memory.at((place * heads + (head - first_head)) * block_tokens + token);
}

BlockId Rank::block_at(std::uint64_t address) const {
  const std::uint64_t word = (address - base) / kWordBytes;
  return static_cast<BlockId>(word / (std::uint64_t{heads} * block_tokens) % blocks);
}

// --- an engine ----------------------------------------------------------------------------------

Machine::Machine(World& world, std::string name, std::uint32_t ranks, std::uint32_t block_tokens)
    : world_(world), block_tokens_(block_tokens), name_(std::move(name)), rank_count_(ranks) {}

void Machine::start() {
  KVPUSH_CHECK(!alive(), "a process starts once");
  ++life_;
  stalled_until_ = 0;
  const std::string suffix =
      world_.settings().same_name_after_restart ? "" : "#" + std::to_string(life_);
  const std::string engine_id = name_ + "-" + std::to_string(life_);
  for (std::uint32_t i = 0; i < rank_count_; ++i) {
    const std::string label = name_ + "." + std::to_string(i);
    ranks_.push_back(std::make_unique<Rank>(world_, label + suffix, label, i, rank_count_,
                                            block_tokens_, engine_id));
    later(0, [this, i] { tick(i); });
  }
  free_.clear();
  for (BlockId block = 0; block < world_.settings().pool_blocks; ++block) {
    free_.push_back(block);
    poison(block);
  }
}

void Machine::die() {
  for (const auto& rank : ranks_) {
    world_.each_checker([&](Checker& checker) { checker.on_died(rank->name); });
  }
  world_.log(name_ + " dies");
  ++life_;
  ranks_.clear();
  on_death();
}

void Machine::stall(DurationNs length) {
  world_.log(name_ + " is stopped for " + std::to_string(length / kMillisecond) + " ms");
  stalled_until_ = std::max(stalled_until_, world_.queue().now() + length);
}

bool Machine::is_stalled() const noexcept {
  return world_.queue().now() < stalled_until_;
}

void Machine::later(DurationNs delay, std::function<void()> step) {
  world_.queue().after(delay, [this, life = life_, step = std::move(step)]() mutable {
    if (life != life_) {
      return;
    }
    const DurationNs stalled = stalled_until_ - world_.queue().now();
    if (stalled > 0) {
      later(stalled, std::move(step));
      return;
    }
    step();
  });
}

void Machine::tick(std::size_t rank) {
  Engine& engine = *ranks_.at(rank)->engine;
  const Activity activity = engine.tick();
  world_.each_checker([&](Checker& checker) { checker.on_looked(ranks_[rank]->name.life); });
  std::vector<EngineEvent> events;
  engine.take_events(events);
  for (EngineEvent& event : events) {
    if (const auto* end = std::get_if<EndAction>(&event)) {
      world_.each_checker([&](Checker& checker) { checker.on_end(ranks_[rank]->name, *end); });
    }
    on_event(rank, event);
  }
  Random& random = world_.random();
  const DurationNs pause =
      activity == Activity::kBusy      ? random.between(50 * kMicrosecond, 600 * kMicrosecond)
      : activity == Activity::kWaiting ? random.between(300 * kMicrosecond, 3 * kMillisecond)
                                       : random.between(kMillisecond, 6 * kMillisecond);
  later(pause, [this, rank] { tick(rank); });
}

void Machine::command(std::size_t rank, Command command) {
  ranks_.at(rank)->engine->handle(std::move(command));
}

std::vector<PeerInfo> Machine::peer_infos() const {
  std::vector<PeerInfo> infos;
  for (const auto& rank : ranks_) {
    infos.push_back(rank->info);
  }
  return infos;
}

Rank* Machine::rank_of(LifeId life) {
  for (const auto& rank : ranks_) {
    if (rank->name.life == life) {
      return rank.get();
    }
  }
  return nullptr;
}

void Machine::report_rest() {
  for (const auto& rank : ranks_) {
    world_.each_checker([&](Checker& checker) {
      checker.on_rest(rank->name, rank->engine->counters(), rank->transport->counts(), 0);
    });
  }
}

std::vector<BlockId> Machine::allocate(std::size_t count) {
  std::vector<BlockId> blocks;
  if (count > free_.size()) {
    return blocks;
  }
  for (std::size_t i = 0; i < count; ++i) {
    // Mostly those given back last: what comes late for their former owner is seen at once.
    const std::size_t near = std::min<std::size_t>(free_.size(), 4);
    const std::size_t pick = free_.size() - 1 - world_.random().below(near);
    blocks.push_back(free_[pick]);
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(pick));
  }
  return blocks;
}

void Machine::free_blocks(const std::vector<BlockId>& blocks) {
  for (const BlockId block : blocks) {
    poison(block);
    free_.push_back(block);
  }
}

void Machine::poison(BlockId block) {
  for (const auto& rank : ranks_) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      std::uint64_t* first = &rank->word(layer, block, rank->first_head, 0);
      std::fill_n(first, std::size_t{rank->heads} * rank->block_tokens, world_.random().next());
    }
  }
}

void Machine::fill(std::uint64_t prompt, const std::vector<BlockId>& blocks, TokenSpan span) {
  for (const auto& rank : ranks_) {
    for (std::uint32_t token = span.begin; token < span.end; ++token) {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        for (std::uint32_t h = rank->first_head; h < rank->first_head + rank->heads; ++h) {
          rank->word(layer, blocks.at(token / block_tokens_), h, token % block_tokens_) =
              kv_word(prompt, layer, h, token);
        }
      }
    }
  }
}

}  // namespace kvpush::sim
