// Errors as values: Status, Result<T>, and the reasons a transfer can end for.
//
// The data path never throws. A Status that is not ok carries one sentence for a human; a Reason
// is the closed set that reaches logs, metrics and the peer. Plain values: any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "check.h"

namespace kvpush {

// Why a transfer ended otherwise than complete. On the wire as one byte: append only.
enum class Reason : std::uint8_t {
  kNone = 0,
  kDeadline = 1,         // the consumer's deadline passed
  kPeerLost = 2,         // the peer's session is gone, or was not heard for the peer time-out
  kPeerUnreachable = 3,  // discovery or HELLO failed
  kIncompatible = 4,     // the peers' geometry or facts differ
  kProducerAborted = 5,  // the prefill was aborted or rejected
  kProducerShort = 6,    // the prefill ended with fewer tokens than were granted
  kOfferExpired = 7,     // no consumer came in time
  kGrantExpired = 8,     // no prefill came in time
  kSuperseded = 9,       // a newer attempt of the same transfer took over
  kAmbiguous = 10,       // another live transfer has the same id and fingerprint
  kTransportError = 11,  // post or completion failed
  kBadRequest = 12,      // the request's own parameters are wrong
  kTableFull = 13,       // a bound was reached
  kRevoked = 14,         // the consumer took its blocks back
  kShutdown = 15,        // the engine is stopping
  kCancelled = 16,       // the router has given the request up
};
constexpr int kReasonCount = 17;

// A stable snake_case name ("deadline", "peer_lost", ...): log lines, metrics labels, Python.
std::string_view reason_name(Reason reason) noexcept;

// Success, or one sentence that says what is wrong and, where there is one, the way out.
class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status ok() { return {}; }
  // `reason` where whoever finds the error knows it better than whoever reports it.
  static Status error(std::string message, Reason reason = Reason::kNone) {
    Status status;
    status.message_ = message.empty() ? "unknown error" : std::move(message);
    status.reason_ = reason;
    return status;
  }

  bool is_ok() const noexcept { return message_.empty(); }
  const std::string& message() const noexcept { return message_; }
  Reason reason() const noexcept { return reason_; }

 private:
  std::string message_;  // empty: success
  Reason reason_ = Reason::kNone;
};

// A value or a Status that is not ok.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Status error) : state_(std::move(error)) {  // NOLINT(google-explicit-constructor)
    KVPUSH_CHECK(!std::get<Status>(state_).is_ok(),
                 "a Result built from a Status must be an error");
  }

  bool is_ok() const noexcept { return std::holds_alternative<T>(state_); }
  T& value() {
    KVPUSH_CHECK(is_ok(), "value() of an error");
    return std::get<T>(state_);
  }
  const T& value() const {
    KVPUSH_CHECK(is_ok(), "value() of an error");
    return std::get<T>(state_);
  }
  const Status& status() const {
    static const Status kOk;
    return is_ok() ? kOk : std::get<Status>(state_);
  }
  const std::string& message() const { return status().message(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace kvpush
