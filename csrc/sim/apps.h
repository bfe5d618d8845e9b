// The applications: what vLLM's scheduler, its workers and its clients do on each side.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "sim/machine.h"

namespace kvpush::sim {

std::uint32_t prompt_tokens(std::uint64_t prompt);
TransferKey key_of(const std::string& id, std::uint64_t prompt);

// Prefills prompts in chunks, offers their KV, and frees blocks when every rank has reported.
class ProducerApp final : public Machine {
 public:
  using Machine::Machine;
  void request(const std::string& id, std::uint64_t prompt);
  bool is_at_rest() const override { return prefills_.empty(); }
  void report_unended() override;

 private:
  struct Prefill {
    std::string id;
    std::uint64_t prompt = 0;
    std::vector<BlockId> blocks;
    std::uint32_t done_tokens = 0;
    std::set<std::size_t> open_ranks;  // offered, and not ended
    bool offered = false;
    bool over = false;  // the last chunk was offered, or it was withdrawn
    int running_chunks = 0;
    std::set<std::size_t> rewinding;  // ranks that have not answered yet
    bool rewound = false;             // by all that have
  };
  void begin(Ticket ticket, int tries_left);
  void next_chunk(Ticket ticket);
  void run_chunk(Ticket ticket, TokenSpan span, const std::vector<DeviceEvent>& events);
  void offer(std::size_t rank, Ticket ticket, Prefill& prefill, TokenSpan span, bool bad,
             DeviceEvent event);
  void withdraw(Ticket ticket, bool with_key);
  void rewind(Ticket ticket);
  void compute_again(Ticket ticket);
  void free_if_over(Ticket ticket);
  void release(const std::vector<BlockId>& blocks);
  void on_event(std::size_t rank, EngineEvent& event) override;
  void on_death() override { prefills_.clear(); }

  std::map<Ticket, Prefill> prefills_;
  Ticket next_ticket_ = 1;
  DeviceEvent next_event_ = 1;
};

// Loads the KV of prompts, checks it, and frees blocks when every rank has reported.
class ConsumerApp final : public Machine {
 public:
  using Machine::Machine;
  void request(const std::string& id, std::uint64_t prompt, bool must_succeed);
  bool is_at_rest() const override { return loads_.empty() && waiting_ == 0; }
  void report_unended() override;

 private:
  struct Load {
    std::string id;
    std::uint64_t prompt = 0;
    bool must_succeed = false;
    Attempt attempt = 0;
    TokenSpan span;
    std::uint32_t first_block = 0;
    std::vector<BlockId> blocks;
    std::set<std::size_t> open_ranks;
    bool failed = false;
    std::string why;
    std::vector<std::vector<std::uint64_t>> before;  // memory of each rank when granted
  };
  void begin(Load load, int tries_left);
  void again(Load load, int tries_left);
  void draw_span(Load& load);
  void grant(Ticket ticket);
  void abort(Ticket ticket);
  void finish(Ticket ticket);
  void check_words(Ticket ticket, const Load& load);
  void connect();
  void on_event(std::size_t rank, EngineEvent& event) override;
  void on_end(std::size_t rank, const EndAction& end);
  void on_connected(std::size_t rank, const ConnectResult& result);
  void on_death() override;

  std::map<Ticket, Load> loads_;
  int waiting_ = 0;  // loads that wait for a connection or for blocks
  Ticket next_ticket_ = 1;
  std::uint64_t connect_id_ = 0;
  std::set<std::size_t> connecting_;  // ranks that have not answered
  bool connect_failed_ = false;
  bool connected_ = false;
  std::vector<std::vector<Session>> writers_;  // of each rank
};

}  // namespace kvpush::sim
