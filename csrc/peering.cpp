#include "peering.h"

#include <algorithm>
#include <set>
#include <string>

namespace kvpush {

namespace {

std::vector<std::vector<Region>> regions_of(std::span<const PeerInfo> ranks) {
  std::vector<std::vector<Region>> regions;
  regions.reserve(ranks.size());
  for (const PeerInfo& rank : ranks) {
    regions.push_back(rank.regions);
  }
  return regions;
}

bool holds_heads(const Region& region, const RegionPair& pair) {
  return pair.head_begin >= region.first_head &&
         pair.head_end <= std::uint64_t{region.first_head} + region.heads;
}

Region narrowed(Region region, const RegionPair& pair) {
  if (region.kind == RegionKind::kAttention) {
    region.first_head = pair.head_begin;
    region.heads = pair.head_end - pair.head_begin;
  }
  return region;
}

}  // namespace

Result<std::vector<PeerTarget>> find_targets(std::span<const PeerInfo> producers,
                                             std::span<const PeerInfo> consumers,
                                             std::size_t consumer_index) {
  if (producers.empty() || consumer_index >= consumers.size()) {
    return Status::error("there are " + std::to_string(producers.size()) + " producer ranks and " +
                         std::to_string(consumers.size()) + " consumer ranks; rank " +
                         std::to_string(consumer_index) + " is not among them");
  }
  std::set<Session> sessions;
  for (const PeerInfo& producer : producers) {
    // A rank is known by its session: with two alike, one of them would never be heard of.
    if (producer.session == 0 || !sessions.insert(producer.session).second) {
      return Status::error("producer rank " + std::to_string(producer.tp_rank) + " of engine '" +
                           producer.engine_id + "' names the session of another rank");
    }
    if (Status status = check_compatible(consumers[consumer_index], producer); !status.is_ok()) {
      return status;
    }
  }
  const auto assignment = assign_writers(regions_of(producers), regions_of(consumers));
  if (!assignment.is_ok()) {
    return assignment.status();
  }
  std::vector<PeerTarget> targets;
  for (std::size_t p = 0; p < producers.size(); ++p) {
    const std::vector<RegionPair>& pairs = assignment.value().pairs(p, consumer_index);
    std::uint32_t fan_out = 0;
    for (std::size_t c = 0; c < consumers.size(); ++c) {
      fan_out += assignment.value().pairs(p, c).empty() ? 0U : 1U;
    }
    // A rank that nobody needs still has to be told so, by one consumer rank.
    const bool idle_and_ours = fan_out == 0 && p % consumers.size() == consumer_index;
    if (!pairs.empty() || idle_and_ours) {
      targets.push_back({producers[p], pairs, std::max(fan_out, 1U)});
    }
  }
  return targets;
}

Status check_pairs(std::span<const Region> producer, std::span<const Region> consumer,
                   std::span<const RegionPair> pairs) {
  for (const RegionPair& pair : pairs) {
    if (pair.producer_region >= producer.size() || pair.consumer_region >= consumer.size()) {
      return Status::error("a region pair names region " + std::to_string(pair.producer_region) +
                           " of " + std::to_string(producer.size()) + " here and region " +
                           std::to_string(pair.consumer_region) + " of " +
                           std::to_string(consumer.size()) + " on the peer");
    }
    const Region& from = producer[pair.producer_region];
    const Region& to = consumer[pair.consumer_region];
    const bool heads_fit =
        from.kind == RegionKind::kState ||
        (pair.head_begin < pair.head_end && holds_heads(from, pair) && holds_heads(to, pair));
    if (from.kind != to.kind || from.layer != to.layer || !heads_fit) {
      return Status::error("region pair of layer '" + from.layer + "' here and layer '" + to.layer +
                           "' on the peer does not fit");
    }
    // What makes two regions mappable is assign_writers()'s to say: ask it about the piece they
    // share.
    const std::vector<std::vector<Region>> source{{narrowed(from, pair)}};
    const std::vector<std::vector<Region>> sink{{narrowed(to, pair)}};
    if (const auto assigned = assign_writers(source, sink); !assigned.is_ok()) {
      return assigned.status();
    }
  }
  return Status::ok();
}

}  // namespace kvpush
