#include "nixl_transport.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "nixl_metadata.h"

namespace kvpush {
namespace {

std::string hex(std::uint64_t value) {
  char text[2 + 16 + 1];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string describe(const MemoryRange& range) {
  std::string text = range.kind == MemoryKind::kDevice
                         ? "memory of device " + std::to_string(range.device)
                         : std::string("host memory");
  return text + " [" + hex(range.address) + ", " + hex(range.address) + " + " +
         std::to_string(range.length) + ")";
}

bool same_memory(const MemoryRange& a, const MemoryRange& b) noexcept {
  return a.kind == b.kind && a.device == b.device;
}

bool contains(const MemoryRange& outer, const MemoryRange& inner) noexcept {
  return same_memory(outer, inner) && outer.address <= inner.address &&
         inner.address + inner.length <= outer.address + outer.length;
}

bool overlaps(const MemoryRange& a, const MemoryRange& b) noexcept {
  return same_memory(a, b) && a.address < b.address + b.length && b.address < a.address + a.length;
}

Status check_range(const MemoryRange& range) {
  if (range.length == 0)
    return Status::error("cannot register " + describe(range) + ": it is empty");
  if (range.address == 0 || range.address + range.length < range.address) {
    return Status::error("cannot register " + describe(range) + ": that is no valid address range");
  }
  return Status::ok();
}

// Sorted ranges, merged as register_memory() promises.
std::vector<MemoryRange> merge(std::span<const MemoryRange> ranges) {
  std::vector<MemoryRange> sorted(ranges.begin(), ranges.end());
  std::sort(sorted.begin(), sorted.end(), [](const MemoryRange& a, const MemoryRange& b) {
    if (a.kind != b.kind) return a.kind < b.kind;
    if (a.device != b.device) return a.device < b.device;
    return a.address < b.address;
  });
  std::vector<MemoryRange> merged;
  for (const MemoryRange& range : sorted) {
    if (!merged.empty() && same_memory(merged.back(), range)) {
      MemoryRange& last = merged.back();
      const std::uint64_t end = last.address + last.length;
      const bool joins =
          range.kind == MemoryKind::kHost ? range.address <= end : range.address < end;
      if (joins) {
        last.length = std::max(end, range.address + range.length) - last.address;
        continue;
      }
    }
    merged.push_back(range);
  }
  return merged;
}

}  // namespace

// ---- life ------------------------------------------------------------------------------------

Result<std::unique_ptr<NixlTransport>> NixlTransport::create(
    std::shared_ptr<const NixlLibrary> library, NixlTransportOptions options) {
  KVPUSH_CHECK(library != nullptr, "no library");
  const std::string& name = options.agent_name;
  if (name.empty() || name.size() > kMaxNixlNameBytes || name.find('\0') != std::string::npos) {
    return Status::error("a NIXL agent needs a name of 1 to " + std::to_string(kMaxNixlNameBytes) +
                         " bytes without a zero byte");
  }
  if (options.backend.empty() || options.backend.size() > kMaxNixlNameBytes) {
    return Status::error("the NIXL backend has no usable name: '" + options.backend + "'");
  }
  std::unique_ptr<NixlTransport> transport(
      new NixlTransport(std::move(library), std::move(options)));
  if (Status status = transport->start(); !status.is_ok()) return status;
  return transport;
}

Status NixlTransport::start() {
  // No threads and no locks in NIXL: one thread of ours makes every call. A progress thread would
  // add a mutex, a wake-up and a context switch to each notification.
  const NixlAgentConfig config;
  const NixlStatus status =
      nixl_->create_configured_agent(options_.agent_name.c_str(), &config, &agent_);
  if (status != kNixlSuccess) {
    agent_ = nullptr;
    return nixl_error("cannot create the NIXL agent '" + options_.agent_name + "'", status);
  }
  if (Status created = create_backend(); !created.is_ok()) return created;
  return create_reusables();
}

Status NixlTransport::create_backend() {
  NixlParams* params = nullptr;
  NixlStatus status = nixl_->create_params(&params);
  if (status != kNixlSuccess) return nixl_error("cannot create NIXL backend parameters", status);
  for (const auto& [key, value] : options_.backend_params) {
    status = nixl_->params_add(params, key.c_str(), value.c_str());
    if (status != kNixlSuccess) break;
  }
  if (status == kNixlSuccess) {
    status = nixl_->create_backend(agent_, options_.backend.c_str(), params, &backend_);
  }
  nixl_->destroy_params(params);
  if (status != kNixlSuccess) {
    backend_ = nullptr;
    return nixl_error("cannot create the NIXL backend " + options_.backend + " (library " +
                          library_->path() +
                          "; its plugins are expected in the folder 'plugins' "
                          "beside libnixl.so or in NIXL_PLUGIN_DIR)",
                      status);
  }
  return Status::ok();
}

Status NixlTransport::create_reusables() {
  NixlStatus status = nixl_->create_opt_args(&plain_args_);
  if (status == kNixlSuccess) status = nixl_->opt_args_add_backend(plain_args_, backend_);
  if (status == kNixlSuccess) status = nixl_->create_opt_args(&notify_args_);
  if (status == kNixlSuccess) status = nixl_->opt_args_add_backend(notify_args_, backend_);
  if (status == kNixlSuccess) status = nixl_->opt_args_set_has_notif(notify_args_, true);
  if (status == kNixlSuccess) status = nixl_->create_notif_map(&notifications_);
  for (const NixlMemory memory : {NixlMemory::kDram, NixlMemory::kVram}) {
    DescriptorLists& lists = scratch_[static_cast<std::size_t>(memory)];
    if (status == kNixlSuccess) status = nixl_->create_xfer_dlist(memory, &lists.local);
    if (status == kNixlSuccess) status = nixl_->create_xfer_dlist(memory, &lists.remote);
  }
  return status == kNixlSuccess ? Status::ok() : nixl_error("cannot prepare NIXL objects", status);
}

void NixlTransport::destroy_reusables() {
  for (DescriptorLists& lists : scratch_) {
    if (lists.local != nullptr) nixl_->destroy_xfer_dlist(lists.local);
    if (lists.remote != nullptr) nixl_->destroy_xfer_dlist(lists.remote);
  }
  if (notifications_ != nullptr) nixl_->destroy_notif_map(notifications_);
  if (notify_args_ != nullptr) nixl_->destroy_opt_args(notify_args_);
  if (plain_args_ != nullptr) nixl_->destroy_opt_args(plain_args_);
  if (backend_ != nullptr) nixl_->destroy_backend(backend_);
}

NixlTransport::~NixlTransport() {
  std::size_t in_flight = 0;
  for (auto& [id, handle] : handles_) {
    if (handle.state == HandleState::kInProgress) {
      ++in_flight;
    } else {
      destroy_request(handle.request);
    }
  }
  if (in_flight != 0) {
    std::fprintf(stderr, "kvpush: %zu transfers still in flight; NIXL agent '%s' stays alive\n",
                 in_flight, options_.agent_name.c_str());
    // NIXL's code must stay too; it does, as libraries are never closed.
    return;
  }
  while (!peers_.empty())
    forget_peer(peers_.begin()->first);
  destroy_reusables();
  if (agent_ != nullptr) nixl_->destroy_agent(agent_);
}

Status NixlTransport::nixl_error(const std::string& what, NixlStatus status, Reason reason) {
  last_error_ = what + ": NIXL reports '" + std::string(nixl_status_name(status)) + "' (" +
                std::to_string(status) + "); its log on stderr has the cause";
  return Status::error(last_error_, reason);
}

// ---- memory ----------------------------------------------------------------------------------

Status NixlTransport::register_memory(std::span<const MemoryRange> ranges) {
  for (const MemoryRange& range : ranges) {
    if (Status status = check_range(range); !status.is_ok()) return status;
  }
  for (const MemoryRange& range : merge(ranges)) {
    const auto known = [&range](const MemoryRange& old) { return contains(old, range); };
    if (std::any_of(registered_.begin(), registered_.end(), known)) continue;
    for (const MemoryRange& old : registered_) {
      if (overlaps(old, range)) {
        return Status::error("cannot register " + describe(range) + ": it overlaps " +
                             describe(old) + ", which is registered already");
      }
    }
    if (Status status = register_range(range); !status.is_ok()) return status;
    registered_.push_back(range);
  }
  return Status::ok();
}

Status NixlTransport::register_range(const MemoryRange& range) {
  NixlRegList* list = nullptr;
  NixlStatus status = nixl_->create_reg_dlist(nixl_memory(range.kind), &list);
  if (status == kNixlSuccess) {
    status = nixl_->reg_dlist_add_desc(list, range.address, range.length, range.device, nullptr, 0);
    if (status == kNixlSuccess) status = nixl_->register_mem(agent_, list, plain_args_);
    nixl_->destroy_reg_dlist(list);
  }
  if (status == kNixlSuccess) return Status::ok();
  return nixl_error("cannot register " + describe(range) + " with " + options_.backend, status);
}

// ---- peers -----------------------------------------------------------------------------------

Result<Bytes> NixlTransport::local_metadata() {
  void* data = nullptr;
  std::size_t length = 0;
  const NixlStatus status = nixl_->get_local_md(agent_, &data, &length);
  if (status != kNixlSuccess) return nixl_error("cannot get this agent's metadata", status);
  const std::unique_ptr<void, decltype(&std::free)> owner(data, &std::free);
  if (length > kMaxNixlMetadataBytes) {
    return Status::error("this agent's metadata has " + std::to_string(length) +
                         " bytes, more than the limit of " + std::to_string(kMaxNixlMetadataBytes) +
                         ": too much memory is registered in too many pieces");
  }
  return wrap_nixl_metadata({options_.agent_name, options_.backend,
                             BytesView(static_cast<const std::byte*>(data), length)});
}

Result<std::string> NixlTransport::add_peer(BytesView metadata) {
  const Result<NixlMetadata> unwrapped = unwrap_nixl_metadata(metadata);
  if (!unwrapped.is_ok()) return unwrapped.status();
  const NixlMetadata& parsed = unwrapped.value();
  const std::string& name = parsed.agent_name;
  if (name == options_.agent_name) {
    return Status::error("peer metadata is of this very agent, '" + name + "'");
  }
  if (parsed.backend_name != options_.backend) {
    return Status::error("peer '" + name + "' uses the NIXL backend " + parsed.backend_name +
                         ", this side uses " + options_.backend);
  }
  if (const auto found = peers_.find(name); found != peers_.end()) {
    const Peer& peer = found->second;
    if (peer.in_flight != 0) {
      const bool same =
          std::equal(metadata.begin(), metadata.end(), peer.metadata.begin(), peer.metadata.end());
      if (same && !peer.leaving) return name;
      return Status::error("peer '" + name + "' cannot be replaced yet: " +
                               std::to_string(peer.in_flight) + " transfers with it are in flight",
                           Reason::kPeerUnreachable);
    }
    forget_peer(name);
  }
  char* loaded = nullptr;
  const NixlStatus status =
      nixl_->load_remote_md(agent_, parsed.blob.data(), parsed.blob.size(), &loaded);
  const std::unique_ptr<char, void (*)(void*)> owner(loaded, &std::free);
  if (status != kNixlSuccess) {
    nixl_->invalidate_remote_md(agent_, name.c_str());  // what was loaded before the error
    // The backend fails where nobody is any more; bytes that it can't read are rarer.
    return nixl_error("cannot load the metadata of peer '" + name + "'", status,
                      status == kNixlBackendError ? Reason::kPeerUnreachable : Reason::kNone);
  }
  if (name != loaded) {
    nixl_->invalidate_remote_md(agent_, loaded);
    return Status::error("peer metadata says '" + name + "' outside and '" + loaded + "' inside");
  }
  peers_[name].metadata.assign(metadata.begin(), metadata.end());
  return name;
}

void NixlTransport::remove_peer(const std::string& peer_name) {
  const auto found = peers_.find(peer_name);
  if (found == peers_.end()) return;
  if (found->second.in_flight == 0) {
    forget_peer(peer_name);
  } else {
    found->second.leaving = true;  // end_handle() does the rest
  }
}

void NixlTransport::forget_peer(const std::string& peer_name) {
  const std::string name = peer_name;  // the argument may live in what is erased
  peers_.at(name).lists.clear();       // they point into what NIXL knows of the peer
  nixl_->invalidate_remote_md(agent_, name.c_str());
  peers_.erase(name);
}

bool NixlTransport::is_loaded_in_nixl(const std::string& peer_name) const {
  return nixl_->check_remote_md(agent_, peer_name.c_str(), nullptr) == kNixlSuccess;
}

void NixlTransport::drop_peer(const std::string& peer_name) {
  const auto found = peers_.find(peer_name);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  peer.leaving = true;
  if (peer.in_flight == 0) {
    forget_peer(peer_name);
    return;
  }
  if (is_loaded_in_nixl(peer_name)) return;
  // NIXL saw the peer disconnect: its endpoint is closed, and with it all that used it. It would
  // not ask the backend about them any more.
  const std::string name = peer_name;
  for (auto& [id, handle] : handles_) {
    if (handle.state == HandleState::kInProgress && handle.peer_name == name) {
      end_handle(handle, HandleState::kFailed);
    }
  }
}

// ---- notifications ---------------------------------------------------------------------------

Status NixlTransport::notify(const std::string& peer_name, BytesView payload) {
  const auto found = peers_.find(peer_name);
  if (found == peers_.end() || found->second.leaving) {
    return Status::error("cannot notify '" + peer_name + "': no such peer is connected");
  }
  const NixlStatus status =
      nixl_->gen_notif(agent_, peer_name.c_str(), payload.data(), payload.size(), plain_args_);
  if (status == kNixlSuccess) return Status::ok();
  Status error = nixl_error("cannot notify peer '" + peer_name + "'", status);
  drop_peer(peer_name);
  return error;
}

Status NixlTransport::poll_notifications(std::vector<Notification>& out) {
  const NixlStatus received = nixl_->get_notifs(agent_, notifications_, nullptr);
  std::size_t senders = 0;
  NixlStatus status = nixl_->notif_map_size(notifications_, &senders);
  for (std::size_t i = 0; status == kNixlSuccess && i < senders; ++i) {
    const char* sender = nullptr;
    status = nixl_->notif_map_get_agent_at(notifications_, i, &sender);
    std::size_t count = 0;
    // A sender whose name holds a zero byte cannot be looked up. It is no peer of ours: skip it.
    if (status != kNixlSuccess ||
        nixl_->notif_map_get_notifs_size(notifications_, sender, &count) != kNixlSuccess) {
      continue;
    }
    for (std::size_t j = 0; status == kNixlSuccess && j < count; ++j) {
      const void* data = nullptr;
      std::size_t length = 0;
      status = nixl_->notif_map_get_notif(notifications_, sender, j, &data, &length);
      const auto* const bytes = static_cast<const std::byte*>(data);
      if (status == kNixlSuccess) out.push_back({sender, Bytes(bytes, bytes + length)});
    }
  }
  if (senders != 0) nixl_->notif_map_clear(notifications_);
  if (received != kNixlSuccess) return nixl_error("cannot receive notifications", received);
  if (status != kNixlSuccess) return nixl_error("cannot read a notification", status);
  return Status::ok();
}

// ---- handles ---------------------------------------------------------------------------------

Status NixlTransport::fill_lists(const CopyBatch& batch, const DescriptorLists& lists) {
  NixlStatus status = nixl_->xfer_dlist_clear(lists.local);
  if (status == kNixlSuccess) status = nixl_->xfer_dlist_clear(lists.remote);
  for (const CopyRun& run : batch.runs) {
    if (run.length == 0) return Status::error("cannot post a batch with an empty run");
    if (status != kNixlSuccess) break;
    status =
        nixl_->xfer_dlist_add_desc(lists.local, run.local_address, run.length, batch.local_device);
    if (status != kNixlSuccess) break;
    status = nixl_->xfer_dlist_add_desc(lists.remote, run.remote_address, run.length,
                                        batch.remote_device);
  }
  return status == kNixlSuccess ? Status::ok() : nixl_error("cannot list descriptors", status);
}

Result<NixlXferRequest*> NixlTransport::create_request(CopyDirection direction,
                                                       const std::string& peer_name,
                                                       const CopyBatch& batch, BytesView payload) {
  NixlOptArgs* args = plain_args_;
  if (!payload.empty()) {
    args = notify_args_;
    const NixlStatus set = nixl_->opt_args_set_notif_msg(args, payload.data(), payload.size());
    if (set != kNixlSuccess) return nixl_error("cannot attach a notification", set);
  }
  const NixlOperation operation =
      direction == CopyDirection::kWrite ? NixlOperation::kWrite : NixlOperation::kRead;
  return batch.lists == 0 ? create_from_runs(operation, peer_name, batch, args)
                          : create_from_lists(operation, peer_name, batch, args);
}

Result<NixlXferRequest*> NixlTransport::create_from_runs(NixlOperation operation,
                                                         const std::string& peer_name,
                                                         const CopyBatch& batch,
                                                         NixlOptArgs* args) {
  const DescriptorLists lists{
      scratch_[static_cast<std::size_t>(nixl_memory(batch.local_kind))].local,
      scratch_[static_cast<std::size_t>(nixl_memory(batch.remote_kind))].remote};
  if (Status status = fill_lists(batch, lists); !status.is_ok()) return status;
  NixlXferRequest* request = nullptr;
  const NixlStatus status = nixl_->create_xfer_req(agent_, operation, lists.local, lists.remote,
                                                   peer_name.c_str(), &request, args);
  if (status == kNixlSuccess) return request;
  return nixl_error("cannot prepare a transfer of " + std::to_string(batch.runs.size()) +
                        " runs with peer '" + peer_name +
                        "' (is all of their memory registered, each run inside one range?)",
                    status);
}

Result<NixlXferRequest*> NixlTransport::create_from_lists(NixlOperation operation,
                                                          const std::string& peer_name,
                                                          const CopyBatch& batch,
                                                          NixlOptArgs* args) {
  const std::map<ListsId, NixlLists>& prepared = peers_.at(peer_name).lists;
  const auto found = prepared.find(batch.lists);
  if (found == prepared.end()) {
    return Status::error("cannot post blocks of lists " + std::to_string(batch.lists) +
                         ", which peer '" + peer_name + "' does not have");
  }
  NixlXferRequest* request = nullptr;
  const NixlStatus status = found->second.make_request(operation, batch, args, &request);
  if (status == kNixlSuccess) return request;
  return nixl_error("cannot prepare a transfer of " + std::to_string(batch.local_blocks.size()) +
                        " listed blocks with peer '" + peer_name + "'",
                    status);
}

Result<ListsId> NixlTransport::prepare_lists(const std::string& peer_name, const BlockGrid& grid) {
  const auto found = peers_.find(peer_name);
  if (found == peers_.end() || found->second.leaving) {
    return Status::error("cannot prepare lists for '" + peer_name + "': no such peer is connected");
  }
  Result<NixlLists> lists = NixlLists::prepare(nixl_, agent_, plain_args_, peer_name, grid);
  if (!lists.is_ok()) return lists.status();
  found->second.lists.emplace(next_lists_, std::move(lists.value()));
  return next_lists_++;
}

bool NixlTransport::has_lists(const std::string& peer_name, ListsId lists) const {
  const auto found = peers_.find(peer_name);
  return found != peers_.end() && found->second.lists.contains(lists);
}

Result<HandleId> NixlTransport::post(CopyDirection direction, const std::string& peer_name,
                                     const CopyBatch& batch, BytesView payload) {
  const auto found = peers_.find(peer_name);
  if (found == peers_.end() || found->second.leaving) {
    return Status::error("cannot post to '" + peer_name + "': no such peer is connected");
  }
  if (batch.runs.empty() && batch.lists == 0) {
    return Status::error("cannot post a batch without runs");
  }
  const Result<NixlXferRequest*> created = create_request(direction, peer_name, batch, payload);
  if (!created.is_ok()) return created.status();

  const NixlStatus status = nixl_->post_xfer_req(agent_, created.value(), nullptr);
  if (status != kNixlSuccess && status != kNixlInProgress) {
    Status error = nixl_error("cannot post a transfer with peer '" + peer_name + "'", status);
    destroy_request(created.value());
    drop_peer(peer_name);
    return error;
  }
  const HandleId id = next_handle_++;
  const bool done = status == kNixlSuccess;
  handles_.emplace(
      id, Handle{created.value(), peer_name, done ? HandleState::kDone : HandleState::kInProgress});
  if (!done) ++found->second.in_flight;
  return id;
}

void NixlTransport::end_handle(Handle& handle, HandleState state) {
  handle.state = state;
  const auto found = peers_.find(handle.peer_name);
  KVPUSH_CHECK(found != peers_.end() && found->second.in_flight != 0,
               "a handle in flight keeps its peer");
  Peer& peer = found->second;
  --peer.in_flight;
  if (peer.leaving && peer.in_flight == 0) forget_peer(handle.peer_name);
}

HandleState NixlTransport::poll(HandleId id) {
  const auto found = handles_.find(id);
  KVPUSH_CHECK(found != handles_.end(), "polling a handle that does not exist");
  Handle& handle = found->second;
  if (handle.state != HandleState::kInProgress) return handle.state;
  const NixlStatus status = nixl_->get_xfer_status(agent_, handle.request);
  if (status == kNixlInProgress) return HandleState::kInProgress;
  if (status == kNixlSuccess) {
    end_handle(handle, HandleState::kDone);
    return HandleState::kDone;
  }
  (void)nixl_error("a transfer with peer '" + handle.peer_name + "' failed", status);
  const std::string peer_name = handle.peer_name;
  end_handle(handle, HandleState::kFailed);
  drop_peer(peer_name);
  return HandleState::kFailed;
}

void NixlTransport::destroy_request(NixlXferRequest* request) {
  // Destroying the wrapper without a successful release would leak silently; NIXL refuses that.
  if (nixl_->release_xfer_req(agent_, request) == kNixlSuccess) nixl_->destroy_xfer_req(request);
}

void NixlTransport::release(HandleId id) {
  const auto found = handles_.find(id);
  KVPUSH_CHECK(found != handles_.end(), "releasing a handle that does not exist");
  KVPUSH_CHECK(found->second.state != HandleState::kInProgress, "releasing a handle in flight");
  destroy_request(found->second.request);
  handles_.erase(found);
}

Transport::Counts NixlTransport::counts() const {
  Counts counts{handles_.size(), peers_.size(), 0};
  for (const auto& [name, peer] : peers_)
    counts.lists += peer.lists.size();
  return counts;
}

}  // namespace kvpush
