// PeerInfo: what one rank tells a peer about itself, and whether two ranks may work together.
// Carried by the side channel (producer ranks) and by HELLO (consumer ranks). Pure: any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "region.h"
#include "status.h"
#include "types.h"

namespace kvpush {

// Raised with every change that makes two builds unable to talk: a difference is refused by name.
constexpr std::uint32_t kProtocolVersion = 2;

struct PeerInfo {
  std::uint32_t protocol = kProtocolVersion;
  Session session = 0;
  std::string engine_id;  // vLLM's engine id: the same for all ranks of an engine
  std::uint32_t tp_rank = 0;
  std::uint32_t tp_size = 1;
  std::uint32_t pp_rank = 0;
  std::uint32_t pp_size = 1;
  // What must be equal on both sides, in order, for a human: ("model", "..."), ("dtype", "...").
  std::vector<std::pair<std::string, std::string>> facts;
  std::vector<Region> regions;
  Bytes transport_metadata;  // opaque: Transport::local_metadata()
  bool operator==(const PeerInfo&) const = default;
};

// Bounds of the encoding. A fact is a model name or a number; 64 of them are ten times what we use.
constexpr std::size_t kMaxFacts = 64;
constexpr std::size_t kMaxFactBytes = 4'096;
constexpr std::size_t kMaxNameBytes = 1'024;
// NIXL metadata grows with registered ranges: ~150 bytes each, 4,096 ranges are 0.6 MB.
constexpr std::size_t kMaxMetadataBytes = 16U << 20;

Bytes encode_peer_info(const PeerInfo& info);
// Total: any bytes give a PeerInfo or an error. Regions are validated.
Result<PeerInfo> decode_peer_info(BytesView bytes);

// Ok, or one sentence naming the first field that differs, with both values.
Status check_compatible(const PeerInfo& local, const PeerInfo& remote);

}  // namespace kvpush
