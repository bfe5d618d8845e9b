#include "message.h"

#include <concepts>
#include <type_traits>

#include "peer_info.h"
#include "wire.h"

namespace kvpush {
namespace {

// Block ids travel as runs: in a busy engine neighbours often go up or down by one, and a hole
// (a sliding window's past) is as long as the prompt.
enum RunStep : std::uint8_t { kUp = 0, kDown = 1, kHoles = 2 };
constexpr int kStepBits = 2;

struct BlockRun {
  std::size_t count = 1;
  RunStep step = kUp;
};

BlockRun run_at(const std::vector<BlockId>& ids, std::size_t start) {
  BlockRun run;
  const std::size_t left = ids.size() - start;
  if (ids[start] == kNoBlock) {
    run.step = kHoles;
    while (run.count < left && ids[start + run.count] == kNoBlock) {
      ++run.count;
    }
    return run;
  }
  const auto follows = [&](std::size_t k, std::uint32_t step) {
    const BlockId id = ids[start + k];
    return id != kNoBlock && id == static_cast<BlockId>(ids[start + k - 1] + step);
  };
  const bool down = left > 1 && follows(1, 0xFFFF'FFFFU);
  run.step = down ? kDown : kUp;
  while (run.count < left && follows(run.count, down ? 0xFFFF'FFFFU : 1U)) {
    ++run.count;
  }
  return run;
}

void write_blocks(WireWriter& out, const BlockTable& table) {
  out.varint(table.size());
  for (const GroupBlocks& group : table) {
    out.varint(group.first_block);
    out.varint(group.ids.size());
    std::int64_t previous = 0;
    for (std::size_t i = 0; i < group.ids.size();) {
      const BlockRun run = run_at(group.ids, i);
      out.varint((static_cast<std::uint64_t>(run.count) << kStepBits) | run.step);
      if (run.step != kHoles) {
        out.zigzag(static_cast<std::int64_t>(group.ids[i]) - previous);
        previous = static_cast<std::int64_t>(group.ids[i + run.count - 1]);
      }
      i += run.count;
    }
  }
}

// Appends one run to `ids`; `left` is how many ids the group may still have.
void read_run(WireReader& in, std::size_t left, std::int64_t& previous, std::vector<BlockId>& ids) {
  const std::uint64_t head = in.varint();
  const std::uint64_t count = head >> kStepBits;
  const auto step = static_cast<std::uint8_t>(head & ((1U << kStepBits) - 1));
  if (!in.ok() || count == 0 || count > left || step > kHoles) {
    in.fail();
    return;
  }
  if (step == kHoles) {
    ids.insert(ids.end(), count, kNoBlock);
    return;
  }
  const std::int64_t delta = in.zigzag();
  // |delta| is at most the id range: a larger one would overflow the sum.
  if (delta > 0xFFFF'FFFFLL || delta < -0xFFFF'FFFFLL) {
    in.fail();
    return;
  }
  const std::int64_t start = previous + delta;
  const auto length = static_cast<std::int64_t>(count) - 1;
  const std::int64_t last = step == kDown ? start - length : start + length;
  const auto valid = [](std::int64_t id) { return id >= 0 && id < 0xFFFF'FFFFLL; };
  if (!valid(start) || !valid(last)) {
    in.fail();
    return;
  }
  for (std::int64_t i = 0; i <= length; ++i) {
    ids.push_back(static_cast<BlockId>(step == kDown ? start - i : start + i));
  }
  previous = last;
}

BlockTable read_blocks(WireReader& in) {
  BlockTable table(in.bounded(kMaxGroups));
  std::size_t budget = kMaxBlocksPerGrant;
  for (GroupBlocks& group : table) {
    group.first_block = static_cast<std::uint32_t>(in.bounded(kMaxBlocksPerGrant));
    const std::size_t size = in.bounded(budget);
    // Reserve by what the input can hold: a lying count must not cost memory.
    group.ids.reserve(std::min(size, in.remaining()));
    std::int64_t previous = 0;
    while (in.ok() && group.ids.size() < size) {
      read_run(in, size - group.ids.size(), previous, group.ids);
    }
    budget -= std::min(budget, size);
  }
  return table;
}

void write_span(WireWriter& out, TokenSpan span) {
  out.varint(span.begin);
  out.varint(span.end);
}

TokenSpan read_span(WireReader& in) {
  TokenSpan span;
  span.begin = in.u32();
  span.end = in.u32();
  if (span.end < span.begin) {
    in.fail();
  }
  return span;
}

std::string clipped(const std::string& text) {
  return text.substr(0, kMaxDetailBytes);
}

// --- one writer and one reader for each kind; the kind's number is its place in MessageBody -----

// A body that says nothing but which attempt it is about.
template <typename Body>
concept AttemptOnly = sizeof(Body) == sizeof(Attempt) && requires(Body m) {
  { m.attempt } -> std::same_as<Attempt&>;
};

template <AttemptOnly Body>
void write_body(WireWriter& out, const Body& m) {
  out.u64(m.attempt);
}
template <AttemptOnly Body>
void read_body(WireReader& in, Body& m) {
  m.attempt = in.u64();
}

void write_body(WireWriter& out, const HelloMessage& m) {
  out.u64(m.to);
  out.blob(m.peer_info);
  out.varint(m.pairs.size());
  for (const RegionPair& pair : m.pairs) {
    out.varint(pair.producer_region);
    out.varint(pair.consumer_region);
    out.varint(pair.head_begin);
    out.varint(pair.head_end);
  }
  out.varint(m.fan_out);
}
void read_body(WireReader& in, HelloMessage& m) {
  m.to = in.u64();
  const BytesView info = in.blob(kMaxPeerInfoBytes);
  m.peer_info.assign(info.begin(), info.end());
  const std::size_t pairs = in.bounded(kMaxRegions);
  for (std::size_t i = 0; i < pairs && in.ok(); ++i) {
    RegionPair pair;
    pair.producer_region = in.u32();
    pair.consumer_region = in.u32();
    pair.head_begin = in.u32();
    pair.head_end = in.u32();
    m.pairs.push_back(pair);
  }
  m.fan_out = in.u32();
}

void write_body(WireWriter& out, const WelcomeMessage& m) {
  out.u64(m.to);
  out.varint(m.meeting);
}
void read_body(WireReader& in, WelcomeMessage& m) {
  m.to = in.u64();
  m.meeting = in.varint();
}

void write_body(WireWriter& out, const RefuseMessage& m) {
  out.u64(m.to);
  out.string(clipped(m.detail));
  out.varint(m.meeting);
}
void read_body(WireReader& in, RefuseMessage& m) {
  m.to = in.u64();
  m.detail = in.string(kMaxDetailBytes);
  m.meeting = in.varint();
}

void write_body(WireWriter& out, const GrantMessage& m) {
  out.u64(m.attempt);
  out.string(m.key.transfer_id);
  out.raw(std::as_bytes(std::span(m.key.fingerprint.bytes)));
  write_span(out, m.span);
  write_blocks(out, m.blocks);
}
void read_body(WireReader& in, GrantMessage& m) {
  m.attempt = in.u64();
  m.key.transfer_id = in.string(kMaxTransferIdBytes);
  const BytesView fingerprint = in.raw(m.key.fingerprint.bytes.size());
  if (in.ok()) {
    std::memcpy(m.key.fingerprint.bytes.data(), fingerprint.data(), fingerprint.size());
  }
  m.span = read_span(in);
  m.blocks = read_blocks(in);
}

void write_body(WireWriter& out, const WrittenMessage& m) {
  out.u64(m.attempt);
  write_span(out, m.span);
  out.varint(m.part);
  out.varint(m.parts);
}
void read_body(WireReader& in, WrittenMessage& m) {
  m.attempt = in.u64();
  m.span = read_span(in);
  m.part = in.u32();
  m.parts = static_cast<std::uint32_t>(in.bounded(kMaxParts));
  if (m.parts == 0 || m.part >= m.parts) {
    in.fail();
  }
}

void write_reason(WireWriter& out, Reason reason, const std::string& detail) {
  out.u8(static_cast<std::uint8_t>(reason));
  out.string(clipped(detail));
}
void read_reason(WireReader& in, Reason& reason, std::string& detail) {
  reason = static_cast<Reason>(in.u8());
  detail = in.string(kMaxDetailBytes);
  if (reason == Reason::kNone || static_cast<int>(reason) >= kReasonCount) {
    in.fail();
  }
}

void write_body(WireWriter& out, const FailedMessage& m) {
  out.u64(m.attempt);
  write_reason(out, m.reason, m.detail);
}
void read_body(WireReader& in, FailedMessage& m) {
  m.attempt = in.u64();
  read_reason(in, m.reason, m.detail);
}

void write_body(WireWriter& /*out*/, const KeepaliveMessage& /*m*/) {}
void read_body(WireReader& /*in*/, KeepaliveMessage& /*m*/) {}
void write_body(WireWriter& /*out*/, const GoodbyeMessage& /*m*/) {}
void read_body(WireReader& /*in*/, GoodbyeMessage& /*m*/) {}

void write_body(WireWriter& out, const ReadyMessage& m) {
  out.u64(m.attempt);
  out.varint(m.watermark);
  write_blocks(out, m.blocks);
}
void read_body(WireReader& in, ReadyMessage& m) {
  m.attempt = in.u64();
  m.watermark = in.u32();
  m.blocks = read_blocks(in);
}
void write_body(WireWriter& out, const RecallMessage& m) {
  out.u64(m.attempt);
  write_reason(out, m.reason, m.detail);
}
void read_body(WireReader& in, RecallMessage& m) {
  m.attempt = in.u64();
  read_reason(in, m.reason, m.detail);
}

template <std::size_t Kind = 0>
bool read_kind(WireReader& in, std::size_t kind, MessageBody& body) {
  if constexpr (Kind == std::variant_size_v<MessageBody>) {
    return false;
  } else {
    if (kind != Kind) {
      return read_kind<Kind + 1>(in, kind, body);
    }
    read_body(in, body.emplace<Kind>());
    return true;
  }
}

bool zero_attempt(const MessageBody& body) {
  return std::visit(
      [](const auto& m) {
        if constexpr (requires { m.attempt; }) {
          return m.attempt == 0;
        } else {
          return false;
        }
      },
      body);
}

}  // namespace

Bytes encode_message(const Message& message) {
  WireWriter out;
  out.u8(kMessageVersion);
  out.u8(static_cast<std::uint8_t>(message.body.index()));
  out.u64(message.from);
  out.varint(message.meeting);
  out.varint(message.stamp);
  out.varint(message.echo);
  out.varint(message.serving);
  std::visit([&out](const auto& body) { write_body(out, body); }, message.body);
  return out.take();
}

Result<Message> parse_message(BytesView bytes) {
  WireReader in(bytes);
  const std::uint8_t version = in.u8();
  if (in.ok() && version != kMessageVersion) {
    return Status::error("message version " + std::to_string(version) + " is not " +
                         std::to_string(kMessageVersion));
  }
  const std::size_t kind = in.u8();
  Message message;
  message.from = in.u64();
  message.meeting = in.varint();
  message.stamp = in.varint();
  message.echo = in.varint();
  message.serving = in.varint();
  if (!in.ok() || message.from == 0 || !read_kind(in, kind, message.body) || !in.at_end() ||
      zero_attempt(message.body)) {
    return Status::error("malformed message of " + std::to_string(bytes.size()) + " bytes");
  }
  return message;
}

std::string_view message_name(const MessageBody& body) noexcept {
  static constexpr std::array<std::string_view, std::variant_size_v<MessageBody>> kNames = {
      "HELLO",   "WELCOME",   "REFUSE",  "GRANT", "ACCEPTED",  "WRITTEN",   "FAILED", "REVOKE",
      "REVOKED", "KEEPALIVE", "GOODBYE", "READY", "READ_DONE", "CONFIRMED", "RECALL"};
  return kNames[body.index()];
}

}  // namespace kvpush
