// The rules of the design's section 5, each as an object that watches a world and says when it is
// broken. They know what the applications and the fabric did, nothing of the engine's insides.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "sim/sim_fabric.h"

namespace kvpush::sim {

// One engine's rank, in one life of its process.
struct RankName {
  LifeId life = 0;
  std::string text;  // "D0.1": for humans
};

class Checker {
 public:
  virtual ~Checker() = default;
  virtual std::string name() const = 0;

  virtual void on_granted(const RankName&, Ticket, Attempt, const std::vector<BlockId>&) {}
  virtual void on_offered(const RankName&, Ticket) {}
  // An end was reported to the application of this rank.
  virtual void on_end(const RankName&, const EndAction&) {}
  virtual void on_slice(const RankName&, Attempt, BlockId) {}
  // A consumer's READ is posted, or a piece of it is done: into this block of its own, from this
  // one of the producer's.
  virtual void on_read(const RankName&, HandleId, BlockId, bool /*posted*/) {}
  virtual void on_read_from(const RankName&, HandleId, BlockId, bool /*posted*/) {}
  // A consumer's REVOKE lies before a producer's rank; that has looked at what lay there; it posts.
  virtual void on_revoke_delivered(LifeId /*producer*/, LifeId /*consumer*/, Attempt) {}
  virtual void on_looked(LifeId) {}
  virtual void on_posted(LifeId /*producer*/, LifeId /*consumer*/, Attempt) {}
  // An offer names a block; the application gives it back.
  virtual void on_source_offered(const RankName&, BlockId) {}
  virtual void on_source_freed(const RankName&, BlockId, bool /*still_read*/) {}
  // A word of KV of a load that was reported as received, or of what lies beside it.
  virtual void on_word(const RankName&, Ticket, std::uint64_t /*expected*/,
                       std::uint64_t /*found*/) {}
  virtual void on_load_ended(bool /*clean*/, bool /*done*/, const std::string& /*why*/) {}
  virtual void on_died(const RankName&) {}
  // Time is up: what is still live.
  virtual void on_rest(const RankName&, const EngineCounters&, const Transport::Counts&,
                       std::size_t /*keys*/) {}
  virtual void on_unended(const std::string&) {}

  const std::vector<std::string>& violations() const noexcept { return violations_; }

 protected:
  void violated(std::string what) {
    if (violations_.size() < 3) {  // the rest follows from these
      violations_.push_back(name() + ": " + std::move(what));
    }
  }

 private:
  std::vector<std::string> violations_;
};

std::vector<std::unique_ptr<Checker>> make_checkers();

}  // namespace kvpush::sim
