// NixlTransport: the Transport over NIXL's C API that production uses.
//
// The agent has no thread of its own: the engine's loop thread drives it by polling, which also is
// what lets notifications arrive and leave. Like every Transport it belongs to one thread at a
// time; create() may run elsewhere, before that thread starts.
//
// When a handle has ended. NIXL can "release" a transfer that still runs, which cancels nothing on
// the wire, and it stops asking the backend about a transfer as soon as the peer's metadata is
// invalidated. So this class keeps the rule that a handle in flight is never released like this:
//   * remove_peer() with handles in flight refuses new work for the peer at once, and invalidates
//     it in NIXL when the last of them has ended. Until then counts() includes the peer.
//   * A handle ends when the backend says success or error. On UCX an error means that the endpoint
//     failed and was closed by force, with all that was posted to it; all other handles to that
//     peer have ended with it. LIBFABRIC reports completion errors without naming the transfer, so
//     there a failed handle may have writes left in the fabric: blocks it wrote to stay suspect for
//     the fence time.
//   * A post that NIXL refuses half-way may leave writes behind, so the peer is dropped with it.
// After any such failure the peer must be added again before it can be used.
//
// What removing a peer stops: UCX closes the endpoint after flushing and keeps serving what the
// other side connected, so one-sided writes of a live peer are not refused by it. Only the peer's
// own checks, or its death, stop them.
//
// Errors from NIXL are a status and nothing more; the cause is in NIXL's own log on stderr.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "nixl_library.h"
#include "nixl_lists.h"
#include "transport.h"

namespace kvpush {

struct NixlTransportOptions {
  std::string agent_name;       // unique among all peers; at most kMaxNixlNameBytes, no zero byte
  std::string backend = "UCX";  // a NIXL plugin that moves data between processes
  std::map<std::string, std::string> backend_params;  // passed to the plugin as they are
};

class NixlTransport final : public Transport {
 public:
  // Errors name the backend and the library.
  static Result<std::unique_ptr<NixlTransport>> create(std::shared_ptr<const NixlLibrary> library,
                                                       NixlTransportOptions options);

  // With handles still in flight the agent is left alive on purpose, for the process's life:
  // destroying it would release them.
  ~NixlTransport() override;
  NixlTransport(const NixlTransport&) = delete;
  NixlTransport& operator=(const NixlTransport&) = delete;

  const std::string& local_name() const override { return options_.agent_name; }
  Result<Bytes> local_metadata() override;

  // Host ranges that touch or overlap become one registration, so that a run may cross from one to
  // the next. Device ranges are merged only where they overlap: neighbouring allocations are
  // different objects to the driver.
  Status register_memory(std::span<const MemoryRange> ranges) override;

  // Adding a loaded peer again replaces it. While handles to it are in flight, the same metadata
  // changes nothing, and other metadata is an error.
  Result<std::string> add_peer(BytesView metadata) override;
  void remove_peer(const std::string& peer_name) override;

  Status notify(const std::string& peer_name, BytesView payload) override;
  Status poll_notifications(std::vector<Notification>& out) override;

  Result<ListsId> prepare_lists(const std::string& peer_name, const BlockGrid& grid) override;
  bool has_lists(const std::string& peer_name, ListsId lists) const override;
  Result<HandleId> post(CopyDirection direction, const std::string& peer_name,
                        const CopyBatch& batch, BytesView payload) override;
  HandleState poll(HandleId handle) override;
  void release(HandleId handle) override;

  Counts counts() const override;

  // What made the latest handle or peer fail; empty if none has.
  const std::string& last_error() const noexcept { return last_error_; }

 private:
  friend class NixlTransportTimer;  // of the benchmarks: times making and posting apart
  struct Peer {
    Bytes metadata;               // as passed to add_peer()
    std::uint32_t in_flight = 0;  // handles that have not ended
    bool leaving = false;         // removed; waits for its handles
    std::map<ListsId, NixlLists> lists;
  };
  struct Handle {
    NixlXferRequest* request = nullptr;  // owned
    std::string peer_name;
    HandleState state = HandleState::kInProgress;
  };
  // Of the runs of a batch, in one memory kind; kept from call to call for their capacity.
  struct DescriptorLists {
    NixlXferList* local = nullptr;
    NixlXferList* remote = nullptr;
  };

  NixlTransport(std::shared_ptr<const NixlLibrary> library, NixlTransportOptions options)
      : nixl_(*library), library_(std::move(library)), options_(std::move(options)) {}
  Status start();
  Status create_backend();
  Status create_reusables();
  void destroy_reusables();

  Status register_range(const MemoryRange& range);
  Status fill_lists(const CopyBatch& batch, const DescriptorLists& lists);
  Result<NixlXferRequest*> create_request(CopyDirection direction, const std::string& peer_name,
                                          const CopyBatch& batch, BytesView payload);
  Result<NixlXferRequest*> create_from_runs(NixlOperation operation, const std::string& peer_name,
                                            const CopyBatch& batch, NixlOptArgs* args);
  Result<NixlXferRequest*> create_from_lists(NixlOperation operation, const std::string& peer_name,
                                             const CopyBatch& batch, NixlOptArgs* args);
  void destroy_request(NixlXferRequest* request);

  void end_handle(Handle& handle, HandleState state);
  // The fabric has lost the peer: ends its handles where NIXL has dropped it, forgets it.
  void drop_peer(const std::string& peer_name);
  void forget_peer(const std::string& peer_name);
  bool is_loaded_in_nixl(const std::string& peer_name) const;
  Status nixl_error(const std::string& what, NixlStatus status, Reason reason = Reason::kNone);

  const NixlLibrary& nixl_;
  std::shared_ptr<const NixlLibrary> library_;
  NixlTransportOptions options_;

  NixlAgent* agent_ = nullptr;
  NixlBackend* backend_ = nullptr;
  NixlOptArgs* plain_args_ = nullptr;   // the backend alone
  NixlOptArgs* notify_args_ = nullptr;  // the backend, and a notification
  NixlNotifMap* notifications_ = nullptr;
  DescriptorLists scratch_[2];  // by NixlMemory

  std::vector<MemoryRange> registered_;
  std::unordered_map<std::string, Peer> peers_;
  std::unordered_map<HandleId, Handle> handles_;
  HandleId next_handle_ = 1;
  ListsId next_lists_ = 1;
  std::string last_error_;
};

}  // namespace kvpush
