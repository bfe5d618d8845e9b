// assign_writers: which producer rank sends which heads of which layer to which consumer rank.
//
// Layers are matched by name, heads by their global index. A piece of a layer that several
// producers hold (replicated GQA heads, MLA) goes to one of them. With as many consumers as holders
// or more, each consumer has one writer for it; with fewer, a consumer's layers are dealt out over
// its share of the holders in contiguous stretches, so that no holder idles and layers that lie
// side by side in memory stay together.
#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "copy_plan.h"

namespace kvpush {
namespace {

using Ranks = std::span<const std::vector<Region>>;

// Where a layer lives: one entry for each rank that has it, in rank order.
struct Holder {
  std::uint32_t rank;
  std::uint32_t region;
};
using Holders = std::vector<Holder>;
using LayerIndex = std::unordered_map<std::string, Holders>;

// Layers named in a refusal; the rest is counted.
constexpr std::size_t kMaxLayersNamed = 4;

// One piece of one consumer region, and all who could send it.
struct Piece {
  std::uint32_t consumer = 0;
  std::uint32_t consumer_region = 0;
  std::uint32_t head_begin = 0;
  std::uint32_t head_end = 0;
  std::size_t order = 0;   // this consumer's place among those that need the piece
  std::size_t needed = 1;  // how many need it
  Holders candidates;
};

std::string quoted(const std::string& text) {
  return "'" + text + "'";
}

Status differ(const std::string& layer, const char* field, const std::string& producer,
              const std::string& consumer) {
  return Status::error("layer " + quoted(layer) + ": " + field + " is " + producer +
                       " on the producer and " + consumer + " on the consumer");
}

Status differ(const std::string& layer, const char* field, std::uint64_t producer,
              std::uint64_t consumer) {
  return differ(layer, field, std::to_string(producer), std::to_string(consumer));
}

Result<LayerIndex> index_layers(Ranks ranks, const char* side) {
  LayerIndex index;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::string where = std::string(side) + " rank " + std::to_string(rank) + ": ";
    if (ranks[rank].size() > kMaxRegions) {
      return Status::error(where + std::to_string(ranks[rank].size()) + " regions, at most " +
                           std::to_string(kMaxRegions) + " are allowed");
    }
    for (std::size_t i = 0; i < ranks[rank].size(); ++i) {
      const Region& region = ranks[rank][i];
      if (Status status = validate_region(region, i); !status.is_ok()) {
        return Status::error(where + status.message());
      }
      Holders& holders = index[region.layer];
      if (!holders.empty() && holders.back().rank == rank) {
        return Status::error(where + "layer " + quoted(region.layer) + " is declared twice");
      }
      holders.push_back({static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(i)});
    }
  }
  return index;
}

// Refuses layers that `have` has and `lack` doesn't, in the order of declaration.
Status check_layers(Ranks have, const LayerIndex& lack, const char* side) {
  std::string names;
  std::size_t missing = 0;
  std::unordered_map<std::string, bool> seen;
  for (const std::vector<Region>& rank : have) {
    for (const Region& region : rank) {
      if (lack.contains(region.layer) || !seen.emplace(region.layer, true).second) continue;
      if (missing++ < kMaxLayersNamed) {
        names += (names.empty() ? "" : ", ") + quoted(region.layer);
      }
    }
  }
  if (missing == 0) return Status::ok();
  if (missing > kMaxLayersNamed) names += " and more";
  return Status::error("layers: " + std::to_string(missing) + " on the " + side +
                       " only: " + names);
}

Status check_contents(const Region& producer, const Region& consumer) {
  if (producer.kind != consumer.kind) {
    const auto name = [](RegionKind kind) {
      return std::string(kind == RegionKind::kState ? "state" : "attention");
    };
    return differ(consumer.layer, "kind", name(producer.kind), name(consumer.kind));
  }
  if (producer.dtype != consumer.dtype) {
    return differ(consumer.layer, "dtype", quoted(producer.dtype), quoted(consumer.dtype));
  }
  if (consumer.kind == RegionKind::kState) {
    if (producer.state_bytes == consumer.state_bytes) return Status::ok();
    return differ(consumer.layer, "state_bytes", producer.state_bytes, consumer.state_bytes);
  }
  if (producer.total_heads != consumer.total_heads) {
    return differ(consumer.layer, "total_heads", producer.total_heads, consumer.total_heads);
  }
  // Packed content is the components' bytes one after the other, so the two forms map onto each
  // other as long as the whole is the same.
  const bool packed = producer.components == 1 || consumer.components == 1;
  if (producer.components != consumer.components && !packed) {
    return differ(consumer.layer, "components", producer.components, consumer.components);
  }
  if (producer.element_bytes * producer.components !=
      consumer.element_bytes * consumer.components) {
    const auto text = [](const Region& region) {
      return std::to_string(region.components) + " x " + std::to_string(region.element_bytes);
    };
    return differ(consumer.layer, "components x element_bytes", text(producer), text(consumer));
  }
  return Status::ok();
}

bool holds(const Region& region, std::uint32_t head) {
  return head >= region.first_head && head - region.first_head < region.heads;
}

// Cuts one consumer region at every head where the set of its producers changes.
Status cut_heads(Ranks producers, Ranks consumers, const Holders& sources, const Holders& sinks,
                 Holder sink, std::vector<Piece>& pieces) {
  const Region& consumer = consumers[sink.rank][sink.region];
  const std::uint32_t end = consumer.first_head + consumer.heads;
  for (std::uint32_t head = consumer.first_head; head < end;) {
    Piece piece{.consumer = sink.rank,
                .consumer_region = sink.region,
                .head_begin = head,
                .head_end = end,
                .candidates = {}};
    for (const Holder& source : sources) {
      const Region& producer = producers[source.rank][source.region];
      if (holds(producer, head)) {
        piece.candidates.push_back(source);
        piece.head_end = std::min(piece.head_end, producer.first_head + producer.heads);
      } else if (producer.first_head > head) {
        piece.head_end = std::min(piece.head_end, producer.first_head);
      }
    }
    if (piece.candidates.empty()) {
      return Status::error("layer " + quoted(consumer.layer) + ": heads: no producer rank holds " +
                           std::to_string(head) + " to " + std::to_string(piece.head_end - 1) +
                           ", which consumer rank " + std::to_string(sink.rank) + " needs");
    }
    piece.needed = 0;
    for (const Holder& other : sinks) {
      if (!holds(consumers[other.rank][other.region], head)) continue;
      if (other.rank < sink.rank) ++piece.order;
      ++piece.needed;
    }
    head = piece.head_end;
    pieces.push_back(std::move(piece));
  }
  return Status::ok();
}

// A state has no heads to go by. Replicated, any producer has it; otherwise it is split in a way
// only the model knows, and the n-th of as many producers has the n-th consumer's part.
Status match_state(Ranks producers, Ranks consumers, const Holders& sources, const Holders& sinks,
                   std::size_t order, std::vector<Piece>& pieces) {
  const Holder sink = sinks[order];
  const Region& consumer = consumers[sink.rank][sink.region];
  Piece piece{.consumer = sink.rank, .consumer_region = sink.region, .candidates = {}};
  const bool everywhere =
      consumer.replicated && std::ranges::all_of(sources, [&](const Holder& source) {
        return producers[source.rank][source.region].replicated;
      });
  if (everywhere) {
    piece.order = order;
    piece.needed = sinks.size();
    piece.candidates = sources;
  } else if (sources.size() == sinks.size()) {
    piece.candidates = {sources[order]};
  } else {
    return differ(consumer.layer, "ranks that share a state", sources.size(), sinks.size());
  }
  pieces.push_back(std::move(piece));
  return Status::ok();
}

Result<std::vector<Piece>> cut_pieces(Ranks producers, Ranks consumers, const LayerIndex& sources,
                                      const LayerIndex& sinks) {
  std::vector<Piece> pieces;
  for (std::size_t rank = 0; rank < consumers.size(); ++rank) {
    for (std::size_t i = 0; i < consumers[rank].size(); ++i) {
      const Region& consumer = consumers[rank][i];
      const Holders& from = sources.at(consumer.layer);
      const Holders& to = sinks.at(consumer.layer);
      for (const Holder& source : from) {
        Status status = check_contents(producers[source.rank][source.region], consumer);
        if (!status.is_ok()) return status;
      }
      const auto self = std::ranges::find(to, rank, &Holder::rank);
      const auto order = static_cast<std::size_t>(self - to.begin());
      Status status = consumer.kind == RegionKind::kState
                          ? match_state(producers, consumers, from, to, order, pieces)
                          : cut_heads(producers, consumers, from, to, *self, pieces);
      if (!status.is_ok()) return status;
    }
  }
  return pieces;
}

// Pieces of one consumer that the same ranks could send, whatever the layer.
struct PoolKey {
  std::uint32_t consumer;
  std::size_t order;
  std::size_t needed;
  std::vector<std::uint32_t> ranks;
  auto operator<=>(const PoolKey&) const = default;
};

PoolKey pool_key(const Piece& piece) {
  PoolKey key{piece.consumer, piece.order, piece.needed, {}};
  for (const Holder& holder : piece.candidates)
    key.ranks.push_back(holder.rank);
  return key;
}

// The candidate that sends the i-th of a pool's n pieces.
std::size_t choose(const PoolKey& key, std::size_t i, std::size_t n) {
  const std::size_t candidates = key.ranks.size();
  const std::size_t first = key.order * candidates / key.needed;
  if (key.needed >= candidates) return first;
  const std::size_t end = (key.order + 1) * candidates / key.needed;
  return first + i * (end - first) / n;
}

}  // namespace

Result<Assignment> assign_writers(std::span<const std::vector<Region>> producers,
                                  std::span<const std::vector<Region>> consumers) {
  Result<LayerIndex> sources = index_layers(producers, "producer");
  if (!sources.is_ok()) return sources.status();
  Result<LayerIndex> sinks = index_layers(consumers, "consumer");
  if (!sinks.is_ok()) return sinks.status();
  Status status = check_layers(consumers, sources.value(), "consumer");
  if (status.is_ok()) status = check_layers(producers, sinks.value(), "producer");
  if (!status.is_ok()) return status;
  Result<std::vector<Piece>> cut = cut_pieces(producers, consumers, sources.value(), sinks.value());
  if (!cut.is_ok()) return cut.status();

  std::map<PoolKey, std::vector<const Piece*>> pools;
  for (const Piece& piece : cut.value())
    pools[pool_key(piece)].push_back(&piece);
  Assignment assignment(producers.size(), consumers.size());
  for (const auto& [key, pieces] : pools) {
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = *pieces[i];
      const Holder& source = piece.candidates[choose(key, i, pieces.size())];
      assignment.pairs(source.rank, piece.consumer)
          .push_back({source.region, piece.consumer_region, piece.head_begin, piece.head_end});
    }
  }
  return assignment;
}

}  // namespace kvpush
