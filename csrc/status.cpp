#include "status.h"

#include <array>

namespace kvpush {

std::string_view reason_name(Reason reason) noexcept {
  static constexpr std::array<std::string_view, kReasonCount> kNames = {
      "none",          "deadline",         "peer_lost",      "peer_unreachable",
      "incompatible",  "producer_aborted", "producer_short", "offer_expired",
      "grant_expired", "superseded",       "ambiguous",      "transport_error",
      "bad_request",   "table_full",       "revoked",        "shutdown",
      "cancelled",
  };
  const auto index = static_cast<std::size_t>(reason);
  return index < kNames.size() ? kNames[index] : std::string_view("unknown");
}

}  // namespace kvpush
