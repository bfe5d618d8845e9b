// Machine: one simulated vLLM engine of one or two ranks, with the blocks and memory that its
// scheduler and workers would have. Producer and consumer applications drive it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "sim/checkers.h"
#include "sim/settings.h"

namespace kvpush::sim {

class World;

constexpr std::uint32_t kTotalHeads = 2;
constexpr std::uint32_t kLayers = 2;

// The KV word of a prompt at one place: different for every prompt and place.
std::uint64_t kv_word(std::uint64_t prompt, std::uint32_t layer, std::uint32_t head,
                      std::uint32_t token);

// "Has the accelerator finished?", as the world decides.
class SimFence final : public DeviceFence {
 public:
  Result<bool> is_complete(DeviceEvent event) override;
  void begin(DeviceEvent event) { events_[event] = State::kRunning; }
  void finish(DeviceEvent event, bool well) {
    events_[event] = well ? State::kComplete : State::kFailed;
  }

 private:
  enum class State : std::uint8_t { kRunning, kComplete, kFailed };
  std::map<DeviceEvent, State> events_;
};

// One rank: its memory is layers x blocks x heads x tokens, one word each.
struct Rank {
  Rank(World& world, std::string agent, std::string label, std::uint32_t index, std::uint32_t ranks,
       std::uint32_t block_tokens, const std::string& engine_id);

  std::uint64_t& word(std::uint32_t layer, BlockId block, std::uint32_t head, std::uint32_t token);
  BlockId block_at(std::uint64_t address) const;

  std::uint32_t first_head;
  std::uint32_t heads;
  std::uint32_t block_tokens;
  std::uint32_t blocks;
  std::uint64_t base;
  std::vector<std::uint64_t> memory;
  SimClock clock;
  std::unique_ptr<SimTransport> transport;
  RankName name;
  SimFence fence;
  PeerInfo info;
  std::unique_ptr<Engine> engine;
};

class Machine {
 public:
  Machine(World& world, std::string name, std::uint32_t ranks, std::uint32_t block_tokens);
  virtual ~Machine() = default;
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  void start();
  void die();
  void stall(DurationNs length);
  bool is_stalled() const noexcept;
  bool alive() const noexcept { return !ranks_.empty(); }
  const std::string& name() const noexcept { return name_; }
  std::vector<PeerInfo> peer_infos() const;
  std::vector<std::unique_ptr<Rank>>& ranks() noexcept { return ranks_; }
  Rank* rank_of(LifeId life);
  void report_rest();
  virtual bool is_at_rest() const = 0;
  virtual void report_unended() = 0;

 protected:
  virtual void on_event(std::size_t rank, EngineEvent& event) = 0;
  virtual void on_death() = 0;

  // Runs `step` after `delay`, later if the process is stopped then, never if it has died.
  void later(DurationNs delay, std::function<void()> step);
  void command(std::size_t rank, Command command);
  // Block ids in no order, or an empty list if there are too few.
  std::vector<BlockId> allocate(std::size_t count);
  // Gives blocks back: they are poisoned, and taken by the next who asks.
  void free_blocks(const std::vector<BlockId>& blocks);
  void poison(BlockId block);
  void fill(std::uint64_t prompt, const std::vector<BlockId>& blocks, TokenSpan span);

  World& world_;
  std::uint32_t block_tokens_;

 private:
  void tick(std::size_t rank);

  std::string name_;
  std::uint32_t rank_count_;
  std::uint64_t life_ = 0;  // counts starts
  TimeNs stalled_until_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<BlockId> free_;
};

}  // namespace kvpush::sim
