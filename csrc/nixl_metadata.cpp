#include "nixl_metadata.h"

#include <algorithm>
#include <array>

namespace kvpush {
namespace {

// Layout, little-endian: magic (8), checksum (8), blob length (4), agent name length (2), backend
// name length (2), agent name, backend name, blob. The checksum covers all that follows it.
constexpr std::array<char, 8> kMagic = {'k', 'v', 'p', 'n', 'i', 'x', 'l', '1'};
constexpr std::size_t kChecksumAt = kMagic.size();
constexpr std::size_t kCoveredFrom = kChecksumAt + 8;
constexpr std::size_t kHeaderBytes = kCoveredFrom + 4 + 2 + 2;

// FNV-1a, 64 bits.
std::uint64_t checksum(BytesView bytes) noexcept {
  std::uint64_t hash = 14695981039346656037U;
  for (const std::byte byte : bytes) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 1099511628211U;
  }
  return hash;
}

void append_integer(Bytes& out, std::uint64_t value, std::size_t width) {
  for (std::size_t i = 0; i < width; ++i)
    out.push_back(static_cast<std::byte>(value >> (8 * i)));
}

std::uint64_t read_integer(BytesView bytes, std::size_t at, std::size_t width) noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i) {
    value |= static_cast<std::uint64_t>(bytes[at + i]) << (8 * i);
  }
  return value;
}

void append_text(Bytes& out, const std::string& text) {
  for (const char c : text)
    out.push_back(static_cast<std::byte>(c));
}

std::string read_text(BytesView bytes) {
  std::string text(bytes.size(), '\0');
  std::transform(bytes.begin(), bytes.end(), text.begin(),
                 [](std::byte byte) { return static_cast<char>(byte); });
  return text;
}

// C strings end at the first NUL, so a name that holds one would be two names to NIXL.
bool is_usable_name(const std::string& name) noexcept {
  return !name.empty() && name.size() <= kMaxNixlNameBytes && name.find('\0') == std::string::npos;
}

}  // namespace

Bytes wrap_nixl_metadata(const NixlMetadata& metadata) {
  KVPUSH_CHECK(is_usable_name(metadata.agent_name), "agent name");
  KVPUSH_CHECK(is_usable_name(metadata.backend_name), "backend name");
  KVPUSH_CHECK(metadata.blob.size() <= kMaxNixlMetadataBytes, "metadata too large");
  Bytes out;
  out.reserve(kHeaderBytes + metadata.agent_name.size() + metadata.backend_name.size() +
              metadata.blob.size());
  for (const char c : kMagic)
    out.push_back(static_cast<std::byte>(c));
  append_integer(out, 0, 8);  // the checksum, once the rest is there
  append_integer(out, metadata.blob.size(), 4);
  append_integer(out, metadata.agent_name.size(), 2);
  append_integer(out, metadata.backend_name.size(), 2);
  append_text(out, metadata.agent_name);
  append_text(out, metadata.backend_name);
  out.insert(out.end(), metadata.blob.begin(), metadata.blob.end());

  Bytes sum;
  append_integer(sum, checksum(BytesView(out).subspan(kCoveredFrom)), 8);
  std::copy(sum.begin(), sum.end(), out.begin() + kChecksumAt);
  return out;
}

Result<NixlMetadata> unwrap_nixl_metadata(BytesView bytes) {
  if (bytes.size() < kHeaderBytes) {
    return Status::error("peer metadata of " + std::to_string(bytes.size()) +
                         " bytes is too short to be metadata");
  }
  for (std::size_t i = 0; i < kMagic.size(); ++i) {
    if (bytes[i] != static_cast<std::byte>(kMagic[i])) {
      return Status::error("peer metadata does not start as kvpush metadata does");
    }
  }
  const std::uint64_t blob_bytes = read_integer(bytes, kCoveredFrom, 4);
  const std::size_t agent_bytes = read_integer(bytes, kCoveredFrom + 4, 2);
  const std::size_t backend_bytes = read_integer(bytes, kCoveredFrom + 6, 2);
  const std::uint64_t expected = kHeaderBytes + agent_bytes + backend_bytes + blob_bytes;
  if (blob_bytes > kMaxNixlMetadataBytes || expected != bytes.size()) {
    return Status::error("peer metadata has " + std::to_string(bytes.size()) +
                         " bytes, its header says " + std::to_string(expected));
  }
  if (checksum(bytes.subspan(kCoveredFrom)) != read_integer(bytes, kChecksumAt, 8)) {
    return Status::error("peer metadata is damaged: its checksum is wrong");
  }
  NixlMetadata metadata;
  metadata.agent_name = read_text(bytes.subspan(kHeaderBytes, agent_bytes));
  metadata.backend_name = read_text(bytes.subspan(kHeaderBytes + agent_bytes, backend_bytes));
  metadata.blob = bytes.subspan(kHeaderBytes + agent_bytes + backend_bytes);
  if (!is_usable_name(metadata.agent_name) || !is_usable_name(metadata.backend_name)) {
    return Status::error("peer metadata holds a name that is empty, too long or has a zero byte");
  }
  return metadata;
}

}  // namespace kvpush
