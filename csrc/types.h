// Plain values shared by every layer: identities, token spans, block lists. No behaviour beyond
// comparison. Any thread.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace kvpush {

using Bytes = std::vector<std::byte>;
using BytesView = std::span<const std::byte>;

// One process's life as a peer (one rank's engine): random, nonzero, made at start.
using Session = std::uint64_t;
// One consumer-side try at a transfer, shared by the ranks of the consumer: random, nonzero.
using Attempt = std::uint64_t;
// Names a request of the local engine on the Python side: unique in this process, never on the
// wire.
using Ticket = std::uint64_t;
// A block of a KV cache group, as vLLM's scheduler numbers it.
using BlockId = std::uint32_t;
// Stands for "no block here" in a block list: a hole that a sliding window has left behind.
constexpr BlockId kNoBlock = 0xFFFF'FFFFU;

// 128 bits over all that makes the KV of a prompt differ: token ids, LoRA, cache salt, multimodal
// hashes. Equal fingerprints mean equal KV.
struct Fingerprint {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const Fingerprint&) const = default;
};

// What both legs of one transfer share.
struct TransferKey {
  std::string transfer_id;
  Fingerprint fingerprint;
  auto operator<=>(const TransferKey&) const = default;
};

struct TransferKeyHash {
  std::size_t operator()(const TransferKey& key) const noexcept {
    std::size_t hash = std::hash<std::string>{}(key.transfer_id);
    for (const std::uint8_t byte : key.fingerprint.bytes) {
      hash = hash * 1099511628211U ^ byte;
    }
    return hash;
  }
};

// Token positions [begin, end) of a request, absolute from its first token.
struct TokenSpan {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;

  bool empty() const noexcept { return begin >= end; }
  std::uint32_t size() const noexcept { return empty() ? 0 : end - begin; }
  bool contains(TokenSpan other) const noexcept {
    return other.empty() || (begin <= other.begin && other.end <= end);
  }
  auto operator<=>(const TokenSpan&) const = default;
};

inline TokenSpan intersect(TokenSpan a, TokenSpan b) noexcept {
  const TokenSpan both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? TokenSpan{} : both;
}

// One request's blocks in one KV cache group: ids[i] is the (first_block + i)-th block of the
// request. kNoBlock marks a hole. For attention groups block k holds tokens
// [k * tokens_per_block, (k + 1) * tokens_per_block).
struct GroupBlocks {
  std::uint32_t first_block = 0;
  std::vector<BlockId> ids;
  bool operator==(const GroupBlocks&) const = default;
};

// All groups of one request, indexed by the engine's own group number.
using BlockTable = std::vector<GroupBlocks>;

}  // namespace kvpush
