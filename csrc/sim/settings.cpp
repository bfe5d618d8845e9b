#include "sim/settings.h"

namespace kvpush::sim {

namespace {

void scale_times(EngineConfig& config) {
  config.consumer.resend = 40 * kMillisecond;
  config.consumer.revoke_patience = 300 * kMillisecond;
  config.producer.resend = 40 * kMillisecond;
  config.producer.recall_patience = 300 * kMillisecond;
  config.producer.offer_ttl = 700 * kMillisecond;
  config.producer.grant_ttl = 900 * kMillisecond;
  config.producer.retry_grace = 100 * kMillisecond;
  config.keepalive = 20 * kMillisecond;
  config.peer_timeout = 200 * kMillisecond;
  config.fence_margin = 40 * kMillisecond;
  config.hello_resend = 40 * kMillisecond;
}

std::uint32_t sometimes(Random& random, std::uint32_t most) {
  return random.chance(500) ? 0 : static_cast<std::uint32_t>(random.below(most + 1));
}

// What the fabric may do to writes. In each mode nothing is written after the fence (rule 2): the
// connection breaks, or a write takes no longer than the margin allows.
void draw_fabric(Random& random, FabricFaults& fabric, const EngineConfig& config) {
  const std::uint64_t mode = random.below(3);
  fabric.copy_at_post = mode == 0;
  fabric.removal_breaks = mode == 1;
  const DurationNs longest = mode == 1 ? config.peer_timeout : config.fence_margin / 2;
  fabric.write_max = random.between(kMillisecond, longest);
  fabric.delay_max = random.between(kMillisecond / 5, 5 * kMillisecond);
  fabric.late_per_mille = sometimes(random, 100);
  fabric.late_max = random.between(0, 2 * config.peer_timeout);
  fabric.duplicate_per_mille = sometimes(random, 100);
  fabric.reorder = random.chance(300);
  fabric.post_error_per_mille = sometimes(random, 50);
  fabric.write_error_per_mille = sometimes(random, 50);
  fabric.stuck_per_mille = sometimes(random, 30);
  fabric.invalidate_per_mille = sometimes(random, 5);
  fabric.unloadable_per_mille = sometimes(random, 100);
  fabric.unlistable_per_mille = sometimes(random, 300);
}

// Prepared lists: for a few blocks already, in pieces of a layer or two; sometimes for some only.
void draw_lists(Random& random, EngineConfig& engine) {
  engine.lists.min_descriptors = 1 + static_cast<std::uint32_t>(random.below(4));
  engine.lists.max_blocks = 1 + static_cast<std::uint32_t>(random.below(500));
  if (random.chance(250)) engine.max_prepared_blocks = random.below(300);
}

}  // namespace

bool seed_pulls(std::uint64_t seed) {
  return Random(seed).below(3) == 0;
}

Settings draw_settings(Random& random) {
  Settings s;
  scale_times(s.engine);
  s.clean = random.chance(125);
  s.producer_ranks = 1 + static_cast<std::uint32_t>(random.below(2));
  s.consumer_ranks = 1 + static_cast<std::uint32_t>(random.below(2));
  s.producer_block_tokens = random.chance(750) ? 4 : 8;
  s.consumer_block_tokens = random.chance(750) ? 4 : 8;
  s.chunk_tokens = 4 * (1 + static_cast<std::uint32_t>(random.below(6)));
  s.requests = 3 + static_cast<std::uint32_t>(random.below(8));
  s.engine.producer.granularity_tokens = random.chance(500) ? 0 : s.producer_block_tokens;
  s.engine.poster.max_batch_descriptors = 1 + static_cast<std::uint32_t>(random.below(6));
  s.engine.poster.max_batch_bytes = 64U << random.below(5);
  s.engine.poster.max_handles_in_flight = 1 + static_cast<std::uint32_t>(random.below(6));
  draw_lists(random, s.engine);
  if (s.clean) {
    s.pool_blocks = 200;
    s.fabric.reorder = random.chance(500);
    if (!s.fabric.reorder) {  // a copy of GRANT that comes late is answered by REVOKED, which fails
      s.fabric.duplicate_per_mille = sometimes(random, 200);  // a load if that overtakes WRITTEN
    }
    return s;
  }
  s.consumers = random.chance(200) ? 2 : 1;
  s.pool_blocks = 14 + static_cast<std::uint32_t>(random.below(20));
  s.transfer_ids = 1 + static_cast<std::uint32_t>(random.below(8));
  s.prompts = 1 + static_cast<std::uint32_t>(random.below(8));
  s.same_name_after_restart = random.chance(500);
  draw_fabric(random, s.fabric, s.engine);
  s.abort_per_mille = sometimes(random, 500);
  s.missing_leg_per_mille = sometimes(random, 200);
  s.preempt_per_mille = sometimes(random, 200);
  s.short_per_mille = sometimes(random, 100);
  s.retry_per_mille = sometimes(random, 900);
  s.bad_grant_per_mille = sometimes(random, 100);
  s.fence_error_per_mille = sometimes(random, 50);
  s.stalls = sometimes(random, 3);
  s.crashes = sometimes(random, 2);
  s.strangers = sometimes(random, 10);
  if (random.chance(100)) {  // full tables
    s.engine.consumer.max_grants = 1 + random.below(3);
    s.engine.producer.max_offers = 1 + random.below(3);
    s.engine.producer.max_serves = 2 + random.below(3);  // one request has two at most
    s.engine.producer.max_keys = 1 + random.below(4);
  }
  return s;
}

DurationNs healing_bound(const EngineConfig& config) {
  const DurationNs fence = config.peer_timeout + config.fence_margin;
  const DurationNs load = kConnectTime + kLoadDeadline + config.consumer.revoke_patience + fence;
  const DurationNs prefill = config.producer.offer_ttl + config.producer.grant_ttl + fence;
  return (load + prefill) * 3 / 2;
}

}  // namespace kvpush::sim
