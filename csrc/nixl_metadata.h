// The envelope around a NIXL agent's metadata: who it is from, for which backend, and a checksum.
//
// NIXL and UCX parse metadata trusting its lengths, so damaged bytes could crash this process. The
// envelope refuses them first. It guards against damage, not malice: a checksum is no signature.
// Pure; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "status.h"
#include "types.h"

namespace kvpush {

// Longest agent or backend name, in bytes. Names are made by us: a UUID and a rank fit many times.
constexpr std::size_t kMaxNixlNameBytes = 255;
// Largest metadata of one agent. A registered range costs about 300 bytes with a handful of network
// devices; 4,096 ranges of 4 KiB each, ten times as much, still fit.
constexpr std::size_t kMaxNixlMetadataBytes = std::size_t{16} << 20U;

struct NixlMetadata {
  std::string agent_name;
  std::string backend_name;
  BytesView blob;  // NIXL's own bytes; borrowed from what was parsed
};

Bytes wrap_nixl_metadata(const NixlMetadata& metadata);

// Any bytes may be passed; an error says what is wrong with them.
Result<NixlMetadata> unwrap_nixl_metadata(BytesView bytes);

}  // namespace kvpush
