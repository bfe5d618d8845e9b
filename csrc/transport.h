// Transport: what the engine needs from a fabric. NixlTransport is production's; csrc/sim has
// another. One contract test suite (tests/cpp/transport_contract.h) runs on every implementation.
//
// Thread: every method is called by the engine's loop thread only. Nothing here blocks on a peer.
// Ownership: the transport owns handles; the engine names them by number and releases each one
// exactly once, after it has ended. A handle in flight is never released: RMA can't be cancelled.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory.h"
#include "status.h"
#include "types.h"

namespace kvpush {

enum class CopyDirection : std::uint8_t { kWrite = 0, kRead = 1 };
enum class HandleState : std::uint8_t { kInProgress = 0, kDone = 1, kFailed = 2 };

// Names a handle of this transport; never reused while it is alive.
using HandleId = std::uint64_t;

struct Notification {
  std::string peer_name;  // as claimed by the sender: a hint, not an identity
  Bytes payload;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // This side's name, unique among all peers, and what a peer must load to reach it.
  virtual const std::string& local_name() const = 0;
  virtual Result<Bytes> local_metadata() = 0;

  // Makes memory transferable. Called before local_metadata() is handed out. Errors name the range.
  virtual Status register_memory(std::span<const MemoryRange> ranges) = 0;

  // Loads a peer's metadata; returns its name. Loading the same peer again replaces the old one.
  // Any bytes may be passed: what is not metadata is an error. One with kPeerUnreachable says that
  // the peer behind it can't be reached (now), as far as the transport can tell that from misfits.
  virtual Result<std::string> add_peer(BytesView metadata) = 0;
  // Forgets a peer: nothing more can be posted or sent to it. Its handles go on until they end and
  // must still be released. It does not stop the peer's own writes into our memory: on UCX those of
  // a live peer still land. Unknown names are ignored.
  virtual void remove_peer(const std::string& peer_name) = 0;

  // Sends a notification. Success means accepted for sending, not delivered.
  virtual Status notify(const std::string& peer_name, BytesView payload) = 0;
  // Appends what has arrived; never blocks. An error says that receiving is impaired.
  virtual Status poll_notifications(std::vector<Notification>& out) = 0;

  // Makes lists of all blocks of a grid, so that post() can be told them by index: quicker where
  // few blocks adjoin. They are gone when the peer is removed or replaced. Takes as long as posting
  // a part: some milliseconds for a hundred thousand blocks a side. Errors change nothing: post
  // runs instead.
  virtual Result<ListsId> prepare_lists(const std::string& /*peer_name*/,
                                        const BlockGrid& /*grid*/) {
    return Status::error("this transport has no prepared lists");
  }
  virtual bool has_lists(const std::string& /*peer_name*/, ListsId /*lists*/) const {
    return false;
  }

  // Prepares and posts one handle. `payload`, if not empty, reaches the peer as a notification
  // after all of the batch's bytes are visible there (writes), or when they were read (reads).
  // On error nothing is in flight and there is no handle.
  virtual Result<HandleId> post(CopyDirection direction, const std::string& peer_name,
                                const CopyBatch& batch, BytesView payload) = 0;
  // Drives and reads a handle. kFailed means ended: it writes no more.
  virtual HandleState poll(HandleId handle) = 0;
  // Gives back an ended handle.
  virtual void release(HandleId handle) = 0;

  // Live objects, for leak checks: handles not released, peers loaded, lists prepared.
  struct Counts {
    std::uint64_t handles = 0;
    std::uint64_t peers = 0;
    std::uint64_t lists = 0;
  };
  virtual Counts counts() const = 0;
};

}  // namespace kvpush
