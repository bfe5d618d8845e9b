// World: everything that one seed makes: engines, their applications, a fabric with faults, and the
// checkers that watch. Thread: one. Equal seeds give equal runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim/checkers.h"
#include "sim/machine.h"
#include "sim/settings.h"

namespace kvpush::sim {

class ProducerApp;
class ConsumerApp;

struct RunResult {
  std::vector<std::string> violations;
  std::uint64_t hash = 0;
  std::uint64_t loads_done = 0;
  std::uint64_t loads_failed = 0;
  std::uint64_t posted_from_lists = 0;
  bool ok() const noexcept { return violations.empty(); }
};

class World {
 public:
  World(std::uint64_t seed, bool verbose, bool pull);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Faults first, then healing, then a request that must succeed.
  RunResult run();

  // For the machines.
  Random& random() noexcept { return random_; }
  EventQueue& queue() noexcept { return queue_; }
  SimFabric& fabric() noexcept { return fabric_; }
  const Settings& settings() const noexcept { return settings_; }
  ProducerApp& producer() noexcept { return *producer_; }
  bool healed() const noexcept { return healed_; }
  void each_checker(const std::function<void(Checker&)>& tell);
  void count_load(bool done, bool clean, const std::string& why);
  void log(const std::string& line);

 private:
  struct Request;
  void watch_transfers();
  Rank* consumer_rank(LifeId life);
  void tell_read(HandleId handle, LifeId reader, LifeId source, const CopyRun& run, bool posted);
  void watch_messages();
  void plan_requests();
  void send_request(std::size_t consumer, const std::string& id, std::uint64_t prompt,
                    bool must_succeed);
  void plan_troubles();
  Machine& any_machine();
  void stranger_speaks();
  bool run_until_rest(TimeNs limit);
  void heal();

  Random random_;
  Settings settings_;
  EventQueue queue_;
  SimFabric fabric_;
  bool verbose_;
  bool healed_ = false;
  std::vector<std::unique_ptr<Checker>> checkers_;
  std::unique_ptr<ProducerApp> producer_;
  std::vector<std::unique_ptr<ConsumerApp>> consumers_;
  std::unique_ptr<SimTransport> stranger_;
  RunResult result_;
};

}  // namespace kvpush::sim
