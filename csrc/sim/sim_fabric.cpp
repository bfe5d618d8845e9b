#include "sim/sim_fabric.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <sstream>
#include <utility>

#include "wire.h"

namespace kvpush::sim {

namespace {

constexpr std::uint64_t kMetadataMark = 0x6b76707573687369U;
constexpr std::size_t kMaxNameBytes = 256;
// How long a transfer to a dead or removed peer goes on before the transport gives it up.
constexpr DurationNs kGiveUpMax = 20 * kMillisecond;

std::uint64_t checksum(BytesView bytes) {
  std::uint64_t sum = 14695981039346656037U;
  for (const std::byte byte : bytes) {
    sum = (sum ^ static_cast<std::uint64_t>(byte)) * 1099511628211U;
  }
  return sum;
}

std::string hex(std::uint64_t value) {
  std::ostringstream out;
  out << "0x" << std::hex << value;
  return out.str();
}

}  // namespace

// --- the fabric ---------------------------------------------------------------------------------

std::unique_ptr<SimTransport> SimFabric::attach(std::string name) {
  const LifeId id = next_life_++;
  auto transport = std::make_unique<SimTransport>(*this, id);
  Life& life = lives_[id];
  life.name = std::move(name);
  life.transport = transport.get();
  return transport;
}

void SimFabric::detach(LifeId life) {
  lives_.erase(life);
  for (auto transfer = transfers_.begin(); transfer != transfers_.end();) {
    transfer = transfer->second.from == life ? transfers_.erase(transfer) : std::next(transfer);
  }
  fail_soon(0, life);
}

void SimFabric::heal() {
  faults_.late_per_mille = 0;
  faults_.duplicate_per_mille = 0;
  faults_.post_error_per_mille = 0;
  faults_.unlistable_per_mille = 0;
  faults_.write_error_per_mille = 0;
  faults_.stuck_per_mille = 0;
  faults_.invalidate_per_mille = 0;
  faults_.unloadable_per_mille = 0;
  faults_.write_max = FabricFaults{}.write_max;
}

bool SimFabric::is_source_in_flight(LifeId owner, std::uint64_t address,
                                    std::uint64_t length) const {
  return std::any_of(transfers_.begin(), transfers_.end(), [&](const auto& entry) {
    const Transfer& transfer = entry.second;
    return transfer.from == owner && transfer.state == HandleState::kInProgress &&
           std::any_of(transfer.runs.begin(), transfer.runs.end(), [&](const CopyRun& run) {
             return run.local_address < address + length &&
                    address < run.local_address + run.length;
           });
  });
}

bool SimFabric::is_broken(LifeId from, const Connection& connection) const {
  const auto to = lives_.find(connection.to);
  if (to == lives_.end()) {
    return false;  // nobody has noticed yet
  }
  const auto removals = to->second.removals.find(from);
  return faults_.removal_breaks && removals != to->second.removals.end() &&
         removals->second != connection.removals_seen;
}

std::byte* SimFabric::find_memory(const Life& life, std::uint64_t address,
                                  std::uint64_t length) const {
  auto found = life.registered.upper_bound(address);
  if (found == life.registered.begin()) {
    return nullptr;
  }
  --found;
  const std::uint64_t offset = address - found->first;
  if (offset > found->second.length || length > found->second.length - offset) {
    return nullptr;
  }
  return found->second.memory + offset;
}

void SimFabric::send(LifeId from, const Connection& connection, BytesView payload) {
  const int copies = random_.chance(faults_.duplicate_per_mille) ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    DurationNs delay = random_.between(faults_.delay_min, faults_.delay_max);
    if (random_.chance(faults_.late_per_mille)) {
      delay += random_.between(0, faults_.late_max);
    }
    TimeNs arrival = queue_.now() + delay;
    if (!faults_.reorder) {
      TimeNs& last = last_arrival_[{from, connection.to}];
      arrival = std::max(arrival, last);
      last = arrival;
    }
    queue_.after(arrival - queue_.now(),
                 [this, from, to = connection.to, seen = connection.removals_seen,
                  copy = Bytes(payload.begin(), payload.end())] { deliver(from, to, seen, copy); });
  }
}

void SimFabric::deliver(LifeId from, LifeId to, std::uint64_t removals_seen, const Bytes& payload) {
  const auto receiver = lives_.find(to);
  const auto sender = lives_.find(from);
  if (receiver == lives_.end() || sender == lives_.end() ||
      is_broken(from, Connection{to, removals_seen, false})) {
    return;
  }
  note(static_cast<std::uint64_t>(queue_.now()));
  note((from << 32U) ^ (to << 16U) ^ payload.size());
  receiver->second.inbox.push_back({sender->second.name, payload});
  if (on_delivered) {
    on_delivered(from, to, payload);
  }
}

bool SimFabric::still_goes(const Transfer& transfer) const {
  return transfer.state == HandleState::kInProgress && lives_.contains(transfer.to) &&
         !is_broken(transfer.from, Connection{transfer.to, transfer.removals_seen, false});
}

// Draws a transfer's fate.
void SimFabric::start(HandleId id) {
  Transfer& transfer = transfers_.at(id);
  const bool fails = random_.chance(faults_.write_error_per_mille);
  transfer.stuck = !fails && random_.chance(faults_.stuck_per_mille);
  const DurationNs length = random_.between(faults_.write_max / 50, faults_.write_max);
  // Slices in any order; a transfer that fails or hangs leaves some of them out.
  const auto count = static_cast<std::uint64_t>(random_.between(1, 4));
  const std::uint64_t kept = fails || transfer.stuck ? random_.below(count + 1) : count;
  std::uint64_t begin = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t end = transfer.bytes * (i + 1) / count;
    const DurationNs when = faults_.copy_at_post ? 0 : random_.between(0, length);
    if (i >= kept || end == begin) {
      // left out
    } else if (faults_.copy_at_post) {
      apply(id, begin, end);
    } else {
      queue_.after(when, [this, id, begin, end] { apply(id, begin, end); });
    }
    begin = end;
  }
  if (!transfer.stuck) {
    queue_.after(length,
                 [this, id, fails] { end(id, fails ? HandleState::kFailed : HandleState::kDone); });
  }
}

// Copies bytes [begin, end) of the transfer, counted over its runs.
void SimFabric::apply(HandleId id, std::uint64_t begin, std::uint64_t end) {
  const auto found = transfers_.find(id);
  if (found == transfers_.end() || !still_goes(found->second)) {
    return;
  }
  std::uint64_t at = 0;
  for (const CopyRun& run : found->second.runs) {
    const std::uint64_t from = std::max(at, begin);
    const std::uint64_t to = std::min(at + run.length, end);
    if (from < to) {
      apply_run(id, found->second,
                {run.local_address + (from - at), run.remote_address + (from - at), to - from});
    }
    at += run.length;
  }
}

void SimFabric::apply_run(HandleId id, const Transfer& transfer, const CopyRun& run) {
  std::byte* local = find_memory(lives_.at(transfer.from), run.local_address, run.length);
  std::byte* remote = find_memory(lives_.at(transfer.to), run.remote_address, run.length);
  KVPUSH_CHECK(local != nullptr && remote != nullptr, "post() has looked at these");
  note(run.remote_address);
  if (on_slice) {
    on_slice({id, transfer.from, transfer.to, transfer.direction, run, &transfer.payload});
  }
  const bool read = transfer.direction == CopyDirection::kRead;
  std::memcpy(read ? local : remote, read ? remote : local, run.length);
}

void SimFabric::end(HandleId id, HandleState state) {
  const auto found = transfers_.find(id);
  if (found == transfers_.end() || found->second.state != HandleState::kInProgress) {
    return;
  }
  Transfer& transfer = found->second;
  transfer.state =
      state == HandleState::kDone && !still_goes(transfer) ? HandleState::kFailed : state;
}

// Ends what is under way between the two, from any sender if `from` is 0.
void SimFabric::fail_soon(LifeId from, LifeId to) {
  for (const auto& [id, transfer] : transfers_) {
    if ((from == 0 || transfer.from == from) && transfer.to == to) {
      queue_.after(random_.between(0, kGiveUpMax),
                   [this, handle = id] { end(handle, HandleState::kFailed); });
    }
  }
}

// --- one process's end --------------------------------------------------------------------------

void SimTransport::map_memory(std::uint64_t address, std::byte* memory, std::uint64_t length) {
  self().mapped[address] = {length, memory};
}

const std::string& SimTransport::local_name() const {
  return self().name;
}

Result<Bytes> SimTransport::local_metadata() {
  WireWriter out;
  out.u64(kMetadataMark);
  out.u64(life_);
  out.string(self().name);
  Bytes bytes = out.take();
  WireWriter tail;
  tail.u64(checksum(bytes));
  const Bytes sum = tail.take();
  bytes.insert(bytes.end(), sum.begin(), sum.end());
  return bytes;
}

Status SimTransport::register_memory(std::span<const MemoryRange> ranges) {
  for (const MemoryRange& range : ranges) {
    if (range.length == 0 || range.address + range.length < range.address) {
      return Status::error("memory range at " + hex(range.address) + " of " +
                           std::to_string(range.length) + " bytes is empty or wraps around");
    }
    const auto mapped = self().mapped.find(range.address);
    std::byte* memory = mapped != self().mapped.end()
                            ? mapped->second.memory
                            : reinterpret_cast<std::byte*>(range.address);  // NOLINT
    self().registered[range.address] = {range.length, memory};
  }
  return Status::ok();
}

Result<std::string> SimTransport::add_peer(BytesView metadata) {
  WireReader in(metadata);
  const std::uint64_t mark = in.u64();
  const LifeId life = in.u64();
  std::string name = in.string(kMaxNameBytes);
  const std::size_t body = metadata.size() - in.remaining();
  const std::uint64_t sum = in.u64();
  if (!in.at_end() || mark != kMetadataMark || sum != checksum(metadata.first(body))) {
    return Status::error("these bytes are not simulated metadata");
  }
  if (life == life_) {
    return Status::error("peer metadata is of this very process, '" + name + "'");
  }
  if (fabric_.random_.chance(fabric_.faults_.unloadable_per_mille)) {
    return Status::error("cannot load the metadata of '" + name + "'", Reason::kPeerUnreachable);
  }
  std::uint64_t seen = 0;
  if (const auto other = fabric_.lives_.find(life); other != fabric_.lives_.end()) {
    seen = other->second.removals[life_];
  }
  self().peers[name] = {life, seen, false};
  self().lists.erase(name);
  return name;
}

void SimTransport::remove_peer(const std::string& peer_name) {
  self().lists.erase(peer_name);
  const auto peer = self().peers.find(peer_name);
  if (peer == self().peers.end()) {
    return;
  }
  const LifeId other = peer->second.to;
  self().peers.erase(peer);
  ++self().removals[other];
  fabric_.fail_soon(life_, other);  // ours to it
  if (fabric_.faults_.removal_breaks) {
    fabric_.fail_soon(other, life_);  // its to us
  }
}

Result<SimFabric::Connection*> SimTransport::usable_peer(const std::string& peer_name) {
  const auto peer = self().peers.find(peer_name);
  if (peer == self().peers.end()) {
    return Status::error("peer '" + peer_name + "' has not been added");
  }
  if (fabric_.random_.chance(fabric_.faults_.invalidate_per_mille)) {
    peer->second.invalid = true;
  }
  if (peer->second.invalid || fabric_.is_broken(life_, peer->second)) {
    return Status::error("the connection to peer '" + peer_name + "' is broken");
  }
  return &peer->second;
}

Status SimTransport::notify(const std::string& peer_name, BytesView payload) {
  const auto peer = usable_peer(peer_name);
  if (!peer.is_ok()) {
    return peer.status();
  }
  fabric_.send(life_, *peer.value(), payload);
  return Status::ok();
}

Status SimTransport::poll_notifications(std::vector<Notification>& out) {
  auto& inbox = self().inbox;
  std::move(inbox.begin(), inbox.end(), std::back_inserter(out));
  inbox.clear();
  return Status::ok();
}

Result<ListsId> SimTransport::prepare_lists(const std::string& peer_name, const BlockGrid& grid) {
  const auto peer = usable_peer(peer_name);
  if (!peer.is_ok()) {
    return peer.status();
  }
  if (fabric_.random_.chance(fabric_.faults_.unlistable_per_mille)) {
    return Status::error("the lists can't be prepared");
  }
  self().lists[peer_name][fabric_.next_lists_] = grid;
  return fabric_.next_lists_++;
}

bool SimTransport::has_lists(const std::string& peer_name, ListsId lists) const {
  const auto found = self().lists.find(peer_name);
  return found != self().lists.end() && found->second.contains(lists);
}

// The runs of a batch, whichever way it tells them.
Result<std::vector<CopyRun>> SimTransport::runs_of(const std::string& peer_name,
                                                   const CopyBatch& batch) const {
  if (batch.lists == 0) {
    return std::vector<CopyRun>(batch.runs.begin(), batch.runs.end());
  }
  if (!has_lists(peer_name, batch.lists) ||
      batch.local_blocks.size() != batch.remote_blocks.size()) {
    return Status::error("no such lists, or not as many blocks on one side as on the other");
  }
  const BlockGrid& grid = self().lists.at(peer_name).at(batch.lists);
  std::vector<CopyRun> runs;
  for (std::size_t i = 0; i < batch.local_blocks.size(); ++i) {
    const auto local = static_cast<std::uint32_t>(batch.local_blocks[i]);
    const auto remote = static_cast<std::uint32_t>(batch.remote_blocks[i]);
    if (local >= grid.local.size() || remote >= grid.remote.size()) {
      return Status::error("an index is beyond the lists");
    }
    runs.push_back({grid.local.address(local), grid.remote.address(remote), grid.block_bytes});
  }
  return runs;
}

Result<HandleId> SimTransport::post(CopyDirection direction, const std::string& peer_name,
                                    const CopyBatch& batch, BytesView payload) {
  const auto peer = usable_peer(peer_name);
  if (!peer.is_ok()) {
    return peer.status();
  }
  Result<std::vector<CopyRun>> runs = runs_of(peer_name, batch);
  if (!runs.is_ok()) {
    return runs.status();
  }
  if (runs.value().empty() || fabric_.random_.chance(fabric_.faults_.post_error_per_mille)) {
    return Status::error("the post is refused");
  }
  const auto remote = fabric_.lives_.find(peer.value()->to);
  std::uint64_t bytes = 0;
  for (const CopyRun& run : runs.value()) {
    const bool here = fabric_.find_memory(self(), run.local_address, run.length) != nullptr;
    const bool there =
        remote == fabric_.lives_.end() ||  // it is dead, which shows later
        fabric_.find_memory(remote->second, run.remote_address, run.length) != nullptr;
    if (run.length == 0 || !here || !there) {
      return Status::error("run at " + hex(run.local_address) + " to " + hex(run.remote_address) +
                           " is empty or not in registered memory");
    }
    bytes += run.length;
  }
  fabric_.posted_from_lists_ += batch.lists != 0 ? 1 : 0;
  const HandleId id = fabric_.next_handle_++;
  SimFabric::Transfer& transfer = fabric_.transfers_[id];
  transfer.from = life_;
  transfer.to = peer.value()->to;
  transfer.removals_seen = peer.value()->removals_seen;
  transfer.direction = direction;
  transfer.runs = std::move(runs.value());
  transfer.payload.assign(payload.begin(), payload.end());
  transfer.bytes = bytes;
  if (fabric_.on_posted) {
    fabric_.on_posted({id, life_, transfer.to, direction, &transfer.runs, &transfer.payload});
  }
  fabric_.start(id);
  if (remote == fabric_.lives_.end()) {
    fabric_.fail_soon(life_, transfer.to);
  }
  return id;
}

HandleState SimTransport::poll(HandleId handle) {
  SimFabric::Transfer& transfer = fabric_.transfers_.at(handle);
  KVPUSH_CHECK(transfer.from == life_, "a handle of another process");
  // A notification leaves only while its initiator looks.
  if (transfer.state == HandleState::kDone && !transfer.told && !transfer.payload.empty()) {
    fabric_.send(life_, {transfer.to, transfer.removals_seen, false}, transfer.payload);
  }
  transfer.told = transfer.state == HandleState::kDone;
  return transfer.state;
}

void SimTransport::release(HandleId handle) {
  const auto found = fabric_.transfers_.find(handle);
  KVPUSH_CHECK(found != fabric_.transfers_.end() && found->second.from == life_,
               "a handle is released once, by its owner");
  KVPUSH_CHECK(found->second.state != HandleState::kInProgress,
               "a handle in flight is never released");
  fabric_.transfers_.erase(found);
}

Transport::Counts SimTransport::counts() const {
  const auto handles =
      std::count_if(fabric_.transfers_.begin(), fabric_.transfers_.end(),
                    [this](const auto& entry) { return entry.second.from == life_; });
  std::uint64_t lists = 0;
  for (const auto& [name, of_peer] : self().lists) {
    lists += of_peer.size();
  }
  return {static_cast<std::uint64_t>(handles), self().peers.size(), lists};
}

}  // namespace kvpush::sim
