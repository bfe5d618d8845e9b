// What one seed draws: how large the world is, what goes wrong in it, and the time-outs.
#pragma once

#include <cstdint>

#include "engine.h"
#include "sim/random.h"
#include "sim/sim_fabric.h"

namespace kvpush::sim {

struct Settings {
  bool pull = false;   // consumers READ; else the producer WRITEs
  bool clean = false;  // nothing goes wrong: every request must succeed
  std::uint32_t producer_ranks = 1;
  std::uint32_t consumer_ranks = 1;
  std::uint32_t consumers = 1;  // engines
  std::uint32_t producer_block_tokens = 4;
  std::uint32_t consumer_block_tokens = 4;
  std::uint32_t pool_blocks = 24;
  std::uint32_t requests = 6;
  std::uint32_t transfer_ids = 100;  // out of how many the requests draw theirs
  std::uint32_t prompts = 100;
  std::uint32_t chunk_tokens = 8;
  bool same_name_after_restart = true;
  FabricFaults fabric;

  std::uint32_t abort_per_mille = 0;        // of each leg
  std::uint32_t missing_leg_per_mille = 0;  // of each leg
  std::uint32_t preempt_per_mille = 0;      // of each prefill chunk
  std::uint32_t short_per_mille = 0;        // of each prefill chunk: it is the last, too early
  std::uint32_t retry_per_mille = 0;        // of each failed load
  std::uint32_t bad_grant_per_mille = 0;
  std::uint32_t fence_error_per_mille = 0;
  std::uint32_t stalls = 0;
  std::uint32_t crashes = 0;
  std::uint32_t strangers = 0;  // messages from somebody who is no peer

  EngineConfig engine;
};

// Time-outs are a fiftieth of the defaults, in proportion, so that a run passes many of them.
Settings draw_settings(Random& random);

// Whether a seed's world pulls: one in three. Not drawn with the rest, so that the other seeds'
// runs do not depend on it.
bool seed_pulls(std::uint64_t seed);

constexpr DurationNs kActiveTime = 900 * kMillisecond;
constexpr DurationNs kLoadDeadline = 500 * kMillisecond;
constexpr DurationNs kConnectTime = 250 * kMillisecond;

// How long after healing anything may still be live: the longest chain of waits there is. A grant
// that was made last runs into its deadline, its REVOKE is not answered for `revoke_patience`, and
// the fence is waited for; a prefill that was last waits for `offer_ttl`, and a remembered key for
// `grant_ttl`. One and a half times that, since clocks differ and a retry may be in between.
DurationNs healing_bound(const EngineConfig& config);

}  // namespace kvpush::sim
