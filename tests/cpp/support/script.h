// Scripts for the state machines: an actions list as lines of text, so that a test reads as a
// dialogue of what went in and what came out.
#pragma once

#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "rendezvous.h"

namespace kvpush::script {

using Lines = std::vector<std::string>;

inline std::string text(TokenSpan span) {
  return "[" + std::to_string(span.begin) + "," + std::to_string(span.end) + ")";
}

inline std::string text(const MessageBody& body) {
  std::string line(message_name(body));
  std::visit(
      [&line](const auto& m) {
        using Body = std::decay_t<decltype(m)>;
        if constexpr (requires { m.attempt; }) {
          line += " " + std::to_string(m.attempt);
        }
        if constexpr (std::is_same_v<Body, GrantMessage> || std::is_same_v<Body, WrittenMessage>) {
          line += " " + text(m.span);
        }
        if constexpr (std::is_same_v<Body, ReadyMessage>) {
          line += " " + std::to_string(m.watermark);
        }
        if constexpr (std::is_same_v<Body, FailedMessage> || std::is_same_v<Body, RecallMessage>) {
          line += " " + std::string(reason_name(m.reason));
        }
      },
      body);
  return line;
}

inline std::string text(const Action& action) {
  return std::visit(
      [](const auto& a) -> std::string {
        using Kind = std::decay_t<decltype(a)>;
        if constexpr (std::is_same_v<Kind, SendAction>) {
          return "to " + std::to_string(a.to) + ": " + text(a.body);
        } else if constexpr (std::is_same_v<Kind, PostAction>) {
          return "post " + std::to_string(a.serve) + " to " + std::to_string(a.to) + " " +
                 text(a.span) + (a.last ? " last" : "");
        } else if constexpr (std::is_same_v<Kind, ReadAction>) {
          return "read " + std::to_string(a.read) + " from " + std::to_string(a.from);
        } else if constexpr (std::is_same_v<Kind, EndAction>) {
          const char* how = a.end == End::kDone     ? "done"
                            : a.end == End::kFailed ? "failed "
                                                    : "revoked ";
          return std::string(a.is_grant ? "grant " : "offer ") + std::to_string(a.ticket) + " " +
                 how + (a.end == End::kDone ? "" : std::string(reason_name(a.reason)));
        } else {
          return "drop " + std::to_string(a.peer);
        }
      },
      action);
}

// What the machine asked for since the last look.
inline Lines take(Actions& actions) {
  Lines lines;
  for (const Action& action : actions) {
    lines.push_back(text(action));
  }
  actions.clear();
  return lines;
}

inline TransferKey key_of(const std::string& id, std::uint8_t fingerprint = 1) {
  TransferKey key;
  key.transfer_id = id;
  key.fingerprint.bytes.fill(fingerprint);
  return key;
}

}  // namespace kvpush::script
