// Peering: which producer ranks a consumer rank must meet, and whether a HELLO can be accepted.
// Pure: any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "copy_plan.h"
#include "peer_info.h"
#include "status.h"

namespace kvpush {

// A producer rank that a consumer rank must meet.
struct PeerTarget {
  PeerInfo info;
  std::vector<RegionPair> pairs;  // empty: it has nothing we need, and is ours to tell so
  std::uint32_t fan_out = 1;      // ranks of the consumer engine that this producer rank serves
};

// The producer ranks that consumers[consumer_index] must meet, after checking that the engines
// match: those it needs, and its share of those that no consumer rank needs.
// Errors name the field, or the layer, and both values.
Result<std::vector<PeerTarget>> find_targets(std::span<const PeerInfo> producers,
                                             std::span<const PeerInfo> consumers,
                                             std::size_t consumer_index);

// Checks pairs that came over the wire against both lists of regions: a CopyPlanner takes wrong
// ones for our own mistake.
Status check_pairs(std::span<const Region> producer, std::span<const Region> consumer,
                   std::span<const RegionPair> pairs);

}  // namespace kvpush
