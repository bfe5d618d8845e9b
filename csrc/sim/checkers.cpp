#include "sim/checkers.h"

#include <tuple>

namespace kvpush::sim {

namespace {

// Rules 1 and 2: what reaches a consumer's memory lies in blocks that are granted to just that
// attempt at that moment, and not yet given back.
class TransfersAreGranted final : public Checker {
 public:
  std::string name() const override { return "rule 1 and 2, writes and READs are granted"; }
  void on_granted(const RankName& rank, Ticket ticket, Attempt attempt,
                  const std::vector<BlockId>& blocks) override {
    for (const BlockId block : blocks) {
      granted_[{rank.life, block}] = attempt;
    }
    tickets_[{rank.life, ticket}] = blocks;
  }
  void on_end(const RankName& rank, const EndAction& end) override {
    const auto found = tickets_.find({rank.life, end.ticket});
    if (!end.is_grant || found == tickets_.end()) {
      return;
    }
    for (const BlockId block : found->second) {
      granted_.erase({rank.life, block});
    }
    tickets_.erase(found);
  }
  void on_slice(const RankName& rank, Attempt attempt, BlockId block) override {
    const auto found = granted_.find({rank.life, block});
    if (found == granted_.end() || found->second != attempt) {
      violated("attempt " + std::to_string(attempt) + " wrote into block " + std::to_string(block) +
               " of " + rank.text + ", which is " +
               (found == granted_.end() ? "not granted" : "granted to another attempt"));
    }
  }
  void on_read(const RankName& rank, HandleId handle, BlockId block, bool posted) override {
    const auto found = granted_.find({rank.life, block});
    const Attempt attempt = found == granted_.end() ? 0 : found->second;
    if (posted) {
      reads_[{rank.life, handle, block}] = attempt;
    }
    if (attempt == 0 || attempt != reads_[{rank.life, handle, block}]) {
      violated("a READ " + std::string(posted ? "is posted" : "comes") + " into block " +
               std::to_string(block) + " of " + rank.text + ", which is " +
               (attempt == 0 ? "not granted" : "granted to another attempt"));
    }
  }

 private:
  std::map<std::tuple<LifeId, HandleId, BlockId>, Attempt> reads_;
  std::map<std::pair<LifeId, BlockId>, Attempt> granted_;
  std::map<std::pair<LifeId, Ticket>, std::vector<BlockId>> tickets_;
};

// Rule 1, as far as the producer can know: nothing is posted for an attempt after it has read that
// the attempt is revoked.
class RevokedIsNotPosted final : public Checker {
 public:
  std::string name() const override { return "rule 1, what is revoked is not posted"; }
  void on_revoke_delivered(LifeId producer, LifeId consumer, Attempt attempt) override {
    unread_[producer].emplace_back(consumer, attempt);
  }
  void on_looked(LifeId life) override {
    const auto found = unread_.find(life);
    if (found == unread_.end()) {
      return;
    }
    for (const auto& [consumer, attempt] : found->second) {
      revoked_.insert({life, consumer, attempt});
    }
    unread_.erase(found);
  }
  void on_posted(LifeId producer, LifeId consumer, Attempt attempt) override {
    if (revoked_.contains({producer, consumer, attempt})) {
      violated("attempt " + std::to_string(attempt) + " was posted for after its REVOKE was read");
    }
  }

 private:
  std::map<LifeId, std::vector<std::pair<LifeId, Attempt>>> unread_;
  std::set<std::tuple<LifeId, LifeId, Attempt>> revoked_;
};

// Rule 3: blocks that a transfer reads from are not given back while it does; nor is a READ posted,
// or done in part, after they were.
class SourcesAreHeld final : public Checker {
 public:
  std::string name() const override { return "rule 3, sources are held"; }
  void on_source_freed(const RankName& rank, BlockId block, bool still_read) override {
    if (still_read) {
      violated("block " + std::to_string(block) + " of " + rank.text +
               " was given back while a transfer read from it");
    }
    held_.erase({rank.life, block});
  }
  void on_source_offered(const RankName& rank, BlockId block) override {
    held_.try_emplace({rank.life, block}, ++holds_);
  }
  void on_read_from(const RankName& rank, HandleId handle, BlockId block, bool posted) override {
    const auto held = held_.find({rank.life, block});
    const std::uint64_t hold = held == held_.end() ? 0 : held->second;
    if (posted) {
      reads_[{handle, block}] = hold;
    }
    if (hold == 0 || hold != reads_[{handle, block}]) {
      violated("a READ " + std::string(posted ? "is posted" : "looks") + " at block " +
               std::to_string(block) + " of " + rank.text + ", which was given back");
    }
  }

 private:
  std::map<std::pair<LifeId, BlockId>, std::uint64_t> held_;  // by which number
  std::map<std::pair<HandleId, BlockId>, std::uint64_t> reads_;
  std::uint64_t holds_ = 0;
};

// Rule 4: what was reported as received is the prompt's KV, and nothing beside it was touched.
class BytesAreThePrompts final : public Checker {
 public:
  std::string name() const override { return "rule 4, bytes are the prompt's"; }
  void on_word(const RankName& rank, Ticket ticket, std::uint64_t expected,
               std::uint64_t found) override {
    if (expected != found) {
      violated("ticket " + std::to_string(ticket) + " of " + rank.text + " holds a wrong word");
    }
  }
};

// Rule 5: one end for each ticket and rank, and none for others.
class EndsAreReportedOnce final : public Checker {
 public:
  std::string name() const override { return "rule 5, ends are reported once"; }
  void on_granted(const RankName& rank, Ticket ticket, Attempt /*attempt*/,
                  const std::vector<BlockId>& /*blocks*/) override {
    open_.insert({rank.life, ticket, true});
  }
  void on_offered(const RankName& rank, Ticket ticket) override {
    open_.insert({rank.life, ticket, false});
  }
  void on_end(const RankName& rank, const EndAction& end) override {
    if (open_.erase({rank.life, end.ticket, end.is_grant}) == 0) {
      violated(std::string(end.is_grant ? "grant " : "offer ") + std::to_string(end.ticket) +
               " of " + rank.text + " ended twice, or never was");
    }
  }

 private:
  std::set<std::tuple<LifeId, Ticket, bool>> open_;
};

// Rule 6: everyone's wait is bounded.
class NobodyWaits final : public Checker {
 public:
  std::string name() const override { return "rule 6, waits are bounded"; }
  void on_unended(const std::string& what) override { violated(what + " has not ended"); }
};

// Rule 7: at rest the tables are empty.
class TablesAreEmpty final : public Checker {
 public:
  std::string name() const override { return "rule 7, tables are empty at rest"; }
  void on_rest(const RankName& rank, const EngineCounters& counters,
               const Transport::Counts& transport, std::size_t /*keys*/) override {
    const std::vector<std::pair<const char*, std::uint64_t>> all{
        {"grants", counters.grants_live},        {"offers", counters.offers_live},
        {"serves", counters.served_live},        {"handles", counters.handles_in_flight},
        {"posts", counters.posts_queued},        {"fences", counters.fences_waiting},
        {"transport handles", transport.handles}};
    for (const auto& [what, count] : all) {
      if (count != 0) {
        violated(rank.text + " still has " + std::to_string(count) + " " + what);
      }
    }
  }
};

// Rule 8, and progress: where nothing goes wrong, every request succeeds.
class GoodRequestsSucceed final : public Checker {
 public:
  std::string name() const override { return "rule 8, good requests succeed"; }
  void on_load_ended(bool clean, bool done, const std::string& why) override {
    if (clean && !done) {
      violated("a request failed where nothing was wrong: " + why);
    }
  }
};

}  // namespace

std::vector<std::unique_ptr<Checker>> make_checkers() {
  std::vector<std::unique_ptr<Checker>> all;
  all.push_back(std::make_unique<TransfersAreGranted>());
  all.push_back(std::make_unique<RevokedIsNotPosted>());
  all.push_back(std::make_unique<SourcesAreHeld>());
  all.push_back(std::make_unique<BytesAreThePrompts>());
  all.push_back(std::make_unique<EndsAreReportedOnce>());
  all.push_back(std::make_unique<NobodyWaits>());
  all.push_back(std::make_unique<TablesAreEmpty>());
  all.push_back(std::make_unique<GoodRequestsSucceed>());
  return all;
}

}  // namespace kvpush::sim
