#include "peer_info.h"

#include "wire.h"

namespace kvpush {
namespace {

void write_region(WireWriter& out, const Region& region) {
  out.string(region.layer);
  out.u8(static_cast<std::uint8_t>(region.kind));
  out.varint(region.group);
  out.string(region.dtype);
  out.u8(static_cast<std::uint8_t>(region.memory));
  out.varint(region.device);
  out.varint(region.base);
  out.varint(region.block_stride);
  out.varint(region.num_blocks);
  out.varint(region.tokens_per_block);
  out.varint(region.tokens_per_page);
  out.varint(region.page_stride);
  out.varint(region.token_stride);
  out.varint(region.components);
  out.varint(region.component_stride);
  out.varint(region.first_head);
  out.varint(region.heads);
  out.varint(region.total_heads);
  out.varint(region.head_stride);
  out.varint(region.element_bytes);
  out.varint(region.replicated ? 1 : 0);
  out.varint(region.state_bytes);
}

Region read_region(WireReader& in) {
  Region region;
  region.layer = in.string(kMaxNameBytes);
  region.kind = static_cast<RegionKind>(in.bounded(1));
  region.group = in.u32();
  region.dtype = in.string(kMaxNameBytes);
  region.memory = static_cast<MemoryKind>(in.bounded(1));
  region.device = in.u32();
  region.base = in.varint();
  region.block_stride = in.varint();
  region.num_blocks = in.u32();
  region.tokens_per_block = in.u32();
  region.tokens_per_page = in.u32();
  region.page_stride = in.varint();
  region.token_stride = in.varint();
  region.components = in.u32();
  region.component_stride = in.varint();
  region.first_head = in.u32();
  region.heads = in.u32();
  region.total_heads = in.u32();
  region.head_stride = in.varint();
  region.element_bytes = in.varint();
  region.replicated = in.boolean();
  region.state_bytes = in.varint();
  return region;
}

Status difference(const std::string& field, const std::string& here, const std::string& there) {
  return Status::error("the peer does not match: " + field + " is '" + here + "' here and '" +
                       there + "' on the peer; start both engines with the same " + field);
}

}  // namespace

Bytes encode_peer_info(const PeerInfo& info) {
  WireWriter out;
  out.varint(info.protocol);
  out.u64(info.session);
  out.string(info.engine_id);
  out.varint(info.tp_rank);
  out.varint(info.tp_size);
  out.varint(info.pp_rank);
  out.varint(info.pp_size);
  out.varint(info.facts.size());
  for (const auto& [name, value] : info.facts) {
    out.string(name);
    out.string(value);
  }
  out.varint(info.regions.size());
  for (const Region& region : info.regions) {
    write_region(out, region);
  }
  out.blob(info.transport_metadata);
  return out.take();
}

Result<PeerInfo> decode_peer_info(BytesView bytes) {
  WireReader in(bytes);
  PeerInfo info;
  info.protocol = in.u32();
  if (in.ok() && info.protocol != kProtocolVersion) {
    // Later versions may have other fields from here on: say so instead of misreading them.
    return difference("kvpush protocol version", std::to_string(kProtocolVersion),
                      std::to_string(info.protocol));
  }
  info.session = in.u64();
  info.engine_id = in.string(kMaxNameBytes);
  info.tp_rank = in.u32();
  info.tp_size = in.u32();
  info.pp_rank = in.u32();
  info.pp_size = in.u32();
  const std::size_t facts = in.bounded(kMaxFacts);
  for (std::size_t i = 0; i < facts && in.ok(); ++i) {
    std::string name = in.string(kMaxNameBytes);
    info.facts.emplace_back(std::move(name), in.string(kMaxFactBytes));
  }
  const std::size_t regions = in.bounded(kMaxRegions);
  for (std::size_t i = 0; i < regions && in.ok(); ++i) {
    info.regions.push_back(read_region(in));
  }
  const BytesView metadata = in.blob(kMaxMetadataBytes);
  info.transport_metadata.assign(metadata.begin(), metadata.end());
  if (!in.at_end() || info.session == 0) {
    return Status::error("these bytes are not a kvpush peer description");
  }
  for (std::size_t i = 0; i < info.regions.size(); ++i) {
    if (Status status = validate_region(info.regions[i], i); !status.is_ok()) {
      return status;
    }
  }
  return info;
}

Status check_compatible(const PeerInfo& local, const PeerInfo& remote) {
  const std::size_t common = std::min(local.facts.size(), remote.facts.size());
  for (std::size_t i = 0; i < common; ++i) {
    const auto& [name, value] = local.facts[i];
    const auto& [remote_name, remote_value] = remote.facts[i];
    if (name != remote_name) {
      return difference("fact number " + std::to_string(i), name, remote_name);
    }
    if (value != remote_value) {
      return difference(name, value, remote_value);
    }
  }
  if (local.facts.size() != remote.facts.size()) {
    return difference("number of compatibility facts", std::to_string(local.facts.size()),
                      std::to_string(remote.facts.size()));
  }
  return Status::ok();
}

}  // namespace kvpush
