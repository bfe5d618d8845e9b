// The Python module kvpush._core: every part of it, named once. The only file that includes
// pybind11. Native threads never come through here: Python calls in, and polls for events.
#include <cmath>
#include <cstring>
#include <tuple>

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "copy_plan.h"
#include "copy_plan_parts.h"
#include "engine_thread.h"
#include "nixl_library.h"
#include "nixl_transport.h"
#include "peering.h"
#include "region.h"

#ifndef KVPUSH_VERSION
#define KVPUSH_VERSION "0.0.0"
#endif

namespace py = pybind11;
using namespace pybind11::literals;

namespace kvpush {
namespace {

// --- conversions --------------------------------------------------------------------------------

void throw_if_error(const Status& status) {
  if (!status.is_ok()) {
    throw py::value_error(status.message());
  }
}

// An exception of its own for each way in which a meeting fails.
void throw_if_not_met(const Status& status) {
  PyObject* type = nullptr;
  switch (status.reason()) {
    case Reason::kPeerUnreachable:
      type = PyExc_TimeoutError;
      break;
    case Reason::kPeerLost:
      type = PyExc_ConnectionResetError;
      break;
    case Reason::kTableFull:
      type = PyExc_ConnectionRefusedError;
      break;
    case Reason::kShutdown:
      type = PyExc_ConnectionAbortedError;
      break;
    default:
      throw_if_error(status);
      return;
  }
  PyErr_SetString(type, status.message().c_str());
  throw py::error_already_set();
}

template <typename Enum>
Enum from_name(const std::string& field, const std::string& name, const char* first,
               const char* second) {
  if (name == first) {
    return static_cast<Enum>(0);
  }
  if (name == second) {
    return static_cast<Enum>(1);
  }
  throw py::value_error(field + " is '" + name + "'; it must be '" + first + "' or '" + second +
                        "'");
}

MemoryKind memory_kind(const std::string& name) {
  return from_name<MemoryKind>("memory", name, "host", "device");
}
const char* memory_name(MemoryKind kind) {
  return kind == MemoryKind::kHost ? "host" : "device";
}

BlockId block_id_from(std::int64_t id) {
  if (id == -1) {
    return kNoBlock;
  }
  if (id < 0 || id >= static_cast<std::int64_t>(kNoBlock)) {
    throw py::value_error("block id " + std::to_string(id) +
                          " is out of range; block ids are 0 to 2^32 - 2, and -1 marks a hole");
  }
  return static_cast<BlockId>(id);
}

std::vector<BlockId> block_ids_from(const py::handle& object) {
  if (py::isinstance<py::array_t<BlockId>>(object)) {
    const auto array = py::array_t<BlockId, py::array::c_style>::ensure(object);
    if (!array || array.ndim() != 1) {
      throw py::value_error("block ids must be one-dimensional");
    }
    return {array.data(), array.data() + array.size()};
  }
  std::vector<BlockId> ids;
  if (PyList_CheckExact(object.ptr())) {  // what vLLM gives: many and often, so without casters
    const Py_ssize_t count = PyList_GET_SIZE(object.ptr());
    ids.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      const std::int64_t id = PyLong_AsLongLong(PyList_GET_ITEM(object.ptr(), i));
      if (id == -1 && PyErr_Occurred() != nullptr) {
        throw py::error_already_set();
      }
      ids.push_back(block_id_from(id));
    }
    return ids;
  }
  const auto sequence = py::reinterpret_borrow<py::sequence>(object);
  ids.reserve(sequence.size());
  for (const py::handle item : sequence) {
    ids.push_back(block_id_from(py::cast<std::int64_t>(item)));
  }
  return ids;
}

BlockTable block_table_from(const py::sequence& groups) {
  if (groups.size() > kMaxGroups) {
    throw py::value_error("there are " + std::to_string(groups.size()) + " block groups; at most " +
                          std::to_string(kMaxGroups) + " are allowed");
  }
  BlockTable table;
  table.reserve(groups.size());
  for (const py::handle item : groups) {
    const auto pair = py::cast<std::pair<std::uint32_t, py::object>>(item);
    table.push_back({pair.first, block_ids_from(pair.second)});
  }
  return table;
}

TransferKey key_from(const std::string& transfer_id, const py::bytes& fingerprint) {
  TransferKey key;
  const std::string_view bytes = fingerprint;
  if (bytes.size() != key.fingerprint.bytes.size()) {
    throw py::value_error("fingerprint has " + std::to_string(bytes.size()) +
                          " bytes; it must have 16");
  }
  if (transfer_id.empty() || transfer_id.size() > kMaxTransferIdBytes) {
    throw py::value_error("transfer_id has " + std::to_string(transfer_id.size()) +
                          " bytes; it must have 1 to " + std::to_string(kMaxTransferIdBytes));
  }
  key.transfer_id = transfer_id;
  std::memcpy(key.fingerprint.bytes.data(), bytes.data(), bytes.size());
  return key;
}

TokenSpan span_from(std::pair<std::uint32_t, std::uint32_t> span) {
  if (span.second < span.first) {
    throw py::value_error("span ends at " + std::to_string(span.second) + ", before its begin " +
                          std::to_string(span.first));
  }
  return {span.first, span.second};
}

DurationNs seconds(const char* field, double value) {
  if (!std::isfinite(value) || value < 0 || value > 1e9) {
    throw py::value_error(std::string(field) + " is " + std::to_string(value) +
                          "; it must be seconds from 0 to 1e9");
  }
  return static_cast<DurationNs>(value * static_cast<double>(kSecond));
}

Bytes bytes_from(const py::bytes& object) {
  const std::string_view view = object;
  const auto* data = reinterpret_cast<const std::byte*>(view.data());
  return {data, data + view.size()};
}

py::bytes bytes_to(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Reason reason_from(const std::string& name) {
  for (int i = 0; i < kReasonCount; ++i) {
    if (reason_name(static_cast<Reason>(i)) == name) {
      return static_cast<Reason>(i);
    }
  }
  throw py::value_error("reason '" + name + "' is not one of status.h's reasons");
}

// --- geometry -----------------------------------------------------------------------------------

Region make_region(std::string layer, std::string dtype, std::uint64_t base,
                   std::uint64_t block_stride, std::uint32_t num_blocks, const std::string& kind,
                   std::uint32_t group, const std::string& memory, std::uint32_t device,
                   std::uint32_t tokens_per_block, std::uint32_t tokens_per_page,
                   std::uint64_t page_stride, std::uint64_t token_stride, std::uint32_t components,
                   std::uint64_t component_stride, std::uint32_t first_head, std::uint32_t heads,
                   std::uint32_t total_heads, std::uint64_t head_stride,
                   std::uint64_t element_bytes, bool replicated, std::uint64_t state_bytes) {
  Region region;
  region.layer = std::move(layer);
  region.kind = from_name<RegionKind>("kind", kind, "attention", "state");
  region.group = group;
  region.dtype = std::move(dtype);
  region.memory = memory_kind(memory);
  region.device = device;
  region.base = base;
  region.block_stride = block_stride;
  region.num_blocks = num_blocks;
  region.tokens_per_block = tokens_per_block;
  region.tokens_per_page = tokens_per_page;
  region.page_stride = page_stride;
  region.token_stride = token_stride;
  region.components = components;
  region.component_stride = component_stride;
  region.first_head = first_head;
  region.heads = heads;
  region.total_heads = total_heads;
  region.head_stride = head_stride;
  region.element_bytes = element_bytes;
  region.replicated = replicated;
  region.state_bytes = state_bytes;
  return region;
}

void bind_region(py::module_& m) {
  py::class_<Region>(m, "Region", py::is_final())
      .def(py::init(&make_region), py::kw_only(), "layer"_a, "dtype"_a, "base"_a, "block_stride"_a,
           "num_blocks"_a, "kind"_a = "attention", "group"_a = 0, "memory"_a = "host",
           "device"_a = 0, "tokens_per_block"_a = 0, "tokens_per_page"_a = 0, "page_stride"_a = 0,
           "token_stride"_a = 0, "components"_a = 1, "component_stride"_a = 0, "first_head"_a = 0,
           "heads"_a = 0, "total_heads"_a = 0, "head_stride"_a = 0, "element_bytes"_a = 0,
           "replicated"_a = false, "state_bytes"_a = 0)
      .def_readonly("layer", &Region::layer)
      .def_readonly("dtype", &Region::dtype)
      .def_property_readonly("kind",
                             [](const Region& region) {
                               return region.kind == RegionKind::kState ? "state" : "attention";
                             })
      .def_readonly("group", &Region::group)
      .def_property_readonly("memory",
                             [](const Region& region) { return memory_name(region.memory); })
      .def_readonly("device", &Region::device)
      .def_readonly("base", &Region::base)
      .def_readonly("block_stride", &Region::block_stride)
      .def_readonly("num_blocks", &Region::num_blocks)
      .def_readonly("tokens_per_block", &Region::tokens_per_block)
      .def_readonly("tokens_per_page", &Region::tokens_per_page)
      .def_readonly("page_stride", &Region::page_stride)
      .def_readonly("token_stride", &Region::token_stride)
      .def_readonly("components", &Region::components)
      .def_readonly("component_stride", &Region::component_stride)
      .def_readonly("first_head", &Region::first_head)
      .def_readonly("heads", &Region::heads)
      .def_readonly("total_heads", &Region::total_heads)
      .def_readonly("head_stride", &Region::head_stride)
      .def_readonly("element_bytes", &Region::element_bytes)
      .def_readonly("replicated", &Region::replicated)
      .def_readonly("state_bytes", &Region::state_bytes)
      .def("__eq__",
           [](const Region& region, const py::object& other) {
             return py::isinstance<Region>(other) && region == py::cast<const Region&>(other);
           })
      .def("__repr__", [](const Region& region) {
        return "Region(layer='" + region.layer + "', group=" + std::to_string(region.group) +
               ", base=" + std::to_string(region.base) +
               ", num_blocks=" + std::to_string(region.num_blocks) + ")";
      });
  m.def(
      "validate_region",
      [](const Region& region, std::size_t index) {
        throw_if_error(validate_region(region, index));
      },
      "region"_a, "index"_a = 0);
}

using PairTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
using RegionLists = std::vector<std::vector<Region>>;

std::vector<std::vector<std::vector<PairTuple>>> assign_writers_py(const RegionLists& producers,
                                                                   const RegionLists& consumers) {
  const auto result = assign_writers(producers, consumers);
  throw_if_error(result.status());
  std::vector<std::vector<std::vector<PairTuple>>> all(producers.size());
  for (std::size_t p = 0; p < producers.size(); ++p) {
    all[p].resize(consumers.size());
    for (std::size_t c = 0; c < consumers.size(); ++c) {
      for (const RegionPair& pair : result.value().pairs(p, c)) {
        all[p][c].emplace_back(pair.producer_region, pair.consumer_region, pair.head_begin,
                               pair.head_end);
      }
    }
  }
  return all;
}

CopyPlanner make_planner(const std::vector<Region>& local, const std::vector<Region>& remote,
                         const std::vector<PairTuple>& tuples, bool local_is_producer) {
  for (const auto* side : {&local, &remote}) {
    for (std::size_t i = 0; i < side->size(); ++i) {
      throw_if_error(validate_region((*side)[i], i));
    }
  }
  std::vector<RegionPair> pairs;
  for (const auto& [producer, consumer, begin, end] : tuples) {
    pairs.push_back({producer, consumer, begin, end});
  }
  throw_if_error(local_is_producer ? check_pairs(local, remote, pairs)
                                   : check_pairs(remote, local, pairs));
  return {local, remote, std::move(pairs), local_is_producer};
}

CopyPlan plan_py(CopyPlanner& planner, std::pair<std::uint32_t, std::uint32_t> span,
                 const py::sequence& local_blocks, const py::sequence& remote_blocks,
                 bool include_state) {
  CopyPlan plan;
  throw_if_error(planner.plan(span_from(span), block_table_from(local_blocks),
                              block_table_from(remote_blocks), plan,
                              include_state ? StateRegions::kCopied : StateRegions::kLeftOut));
  return plan;
}

PatternPlan plan_pattern_py(CopyPlanner& planner, std::pair<std::uint32_t, std::uint32_t> span,
                            const py::sequence& local_blocks, const py::sequence& remote_blocks,
                            bool include_state) {
  PatternPlan plan;
  throw_if_error(planner.plan_pattern(
      span_from(span), block_table_from(local_blocks), block_table_from(remote_blocks), plan,
      include_state ? StateRegions::kCopied : StateRegions::kLeftOut));
  return plan;
}

py::array_t<std::uint64_t> array_of(std::span<const CopyRun> runs, const py::handle& owner) {
  static_assert(sizeof(CopyRun) == 3 * sizeof(std::uint64_t));
  return py::array_t<std::uint64_t>({static_cast<py::ssize_t>(runs.size()), py::ssize_t{3}},
                                    reinterpret_cast<const std::uint64_t*>(runs.data()), owner);
}

py::list spell_out_parts(const PatternPlan& plan, std::uint32_t max_runs, std::uint64_t max_bytes) {
  if (max_runs == 0 || max_bytes == 0) {
    throw py::value_error("max_runs and max_bytes must be at least 1");
  }
  PlanParts parts;
  parts.assign(plan, {max_runs, max_bytes});
  py::list out;
  std::vector<CopyRun> runs;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const CopyBatch batch = parts.spell_out(part, runs);
    out.append(py::make_tuple(py::make_tuple(memory_name(batch.local_kind), batch.local_device,
                                             memory_name(batch.remote_kind), batch.remote_device),
                              array_of(batch.runs, {})));  // without an owner it is a copy
  }
  return out;
}

void bind_planner(py::module_& m) {
  m.def("assign_writers", &assign_writers_py, "producers"_a, "consumers"_a);
  py::class_<CopyPlan>(m, "CopyPlan", py::is_final())
      .def_property_readonly("runs",
                             [](const py::object& self) {
                               return array_of(py::cast<const CopyPlan&>(self).runs, self);
                             })
      .def_property_readonly(
          "batches",
          [](const CopyPlan& plan) {
            py::list batches;
            for (const CopyPlan::Batch& batch : plan.batches) {
              batches.append(py::make_tuple(memory_name(batch.local_kind), batch.local_device,
                                            memory_name(batch.remote_kind), batch.remote_device,
                                            batch.begin, batch.end));
            }
            return batches;
          })
      .def_readonly("bytes", &CopyPlan::bytes)
      .def_readonly("descriptors_before", &CopyPlan::descriptors_before);
  py::class_<PatternPlan>(m, "PatternPlan", py::is_final())
      .def_readonly("total_runs", &PatternPlan::total_runs)
      .def_property_readonly("pattern_runs",
                             [](const PatternPlan& plan) { return plan.runs.size(); })
      .def_readonly("bytes", &PatternPlan::bytes)
      .def_readonly("descriptors_before", &PatternPlan::descriptors_before)
      .def("parts", &spell_out_parts, "max_runs"_a, "max_bytes"_a);
  py::class_<CopyPlanner>(m, "CopyPlanner", py::is_final())
      .def(py::init(&make_planner), "local"_a, "remote"_a, "pairs"_a, "local_is_producer"_a)
      .def("plan", &plan_py, "span"_a, "local_blocks"_a, "remote_blocks"_a,
           "include_state"_a = true)
      .def("plan_pattern", &plan_pattern_py, "span"_a, "local_blocks"_a, "remote_blocks"_a,
           "include_state"_a = true);
}

// --- engine -------------------------------------------------------------------------------------

enum class TransferMode : std::uint8_t { kPush = 0, kPull = 1 };

// Everything a rank's engine is made of, as Python gives it.
struct PyConfig {
  std::string nixl_library;
  NixlTransportOptions transport;
  PeerInfo self;  // regions and transport metadata come later
  EngineConfig engine;
  LoopConfig loop;
};

PyConfig make_config(std::string agent_name, Session session, std::string engine_id,
                     std::string nixl_library, std::string backend,
                     std::map<std::string, std::string> backend_params, std::uint32_t tp_rank,
                     std::uint32_t tp_size, std::uint32_t pp_rank, std::uint32_t pp_size,
                     std::vector<std::pair<std::string, std::string>> facts, double offer_ttl_s,
                     double grant_ttl_s, double retry_grace_s, double keepalive_s,
                     double peer_timeout_s, double fence_margin_s, double resend_s,
                     double revoke_patience_s, std::uint32_t max_batch_descriptors,
                     std::uint64_t max_batch_bytes, std::uint32_t max_handles_in_flight,
                     std::uint64_t max_prepared_blocks, double spin_us, double busy_poll_us,
                     double idle_poll_us, const std::string& thread_policy,
                     std::uint32_t push_granularity_tokens, std::uint32_t min_push_tokens,
                     const std::string& mode) {
  if (session == 0) {
    throw py::value_error("session is 0; it must be a nonzero random number");
  }
  if (max_batch_descriptors == 0 || max_batch_bytes == 0 || max_handles_in_flight == 0) {
    throw py::value_error(
        "max_batch_descriptors, max_batch_bytes and max_handles_in_flight must be at least 1");
  }
  PyConfig config;
  config.nixl_library = std::move(nixl_library);
  config.transport = {std::move(agent_name), std::move(backend), std::move(backend_params)};
  config.self.session = session;
  config.self.engine_id = std::move(engine_id);
  config.self.tp_rank = tp_rank;
  config.self.tp_size = tp_size;
  config.self.pp_rank = pp_rank;
  config.self.pp_size = pp_size;
  config.self.facts = std::move(facts);
  config.engine.producer.offer_ttl = seconds("offer_ttl_s", offer_ttl_s);
  config.engine.producer.grant_ttl = seconds("grant_ttl_s", grant_ttl_s);
  config.engine.producer.retry_grace = seconds("retry_grace_s", retry_grace_s);
  config.engine.producer.granularity_tokens = push_granularity_tokens;
  config.engine.producer.min_piece_tokens = min_push_tokens;
  config.engine.pull = from_name<TransferMode>("mode", mode, "push", "pull") == TransferMode::kPull;
  config.engine.consumer.resend = seconds("resend_s", resend_s);
  config.engine.consumer.revoke_patience = seconds("revoke_patience_s", revoke_patience_s);
  config.engine.producer.resend = config.engine.consumer.resend;
  config.engine.producer.recall_patience = config.engine.consumer.revoke_patience;
  config.engine.hello_resend = config.engine.consumer.resend;
  config.engine.keepalive = seconds("keepalive_s", keepalive_s);
  config.engine.peer_timeout = seconds("peer_timeout_s", peer_timeout_s);
  config.engine.fence_margin = seconds("fence_margin_s", fence_margin_s);
  config.engine.poster = {max_batch_descriptors, max_batch_bytes, max_handles_in_flight};
  config.engine.max_prepared_blocks = max_prepared_blocks;
  config.loop.spin = seconds("spin_us", spin_us * 1e-6);
  config.loop.busy_poll = seconds("busy_poll_us", busy_poll_us * 1e-6);
  config.loop.idle_poll = seconds("idle_poll_us", idle_poll_us * 1e-6);
  config.loop.policy = from_name<ThreadPolicy>("thread_policy", thread_policy, "batch", "normal");
  return config;
}

void bind_config(py::module_& m) {
  py::class_<PyConfig>(m, "EngineConfig", py::is_final())
      .def(py::init(&make_config), py::kw_only(), "agent_name"_a, "session"_a, "engine_id"_a,
           "nixl_library"_a, "backend"_a = "UCX",
           "backend_params"_a = std::map<std::string, std::string>(), "tp_rank"_a = 0,
           "tp_size"_a = 1, "pp_rank"_a = 0, "pp_size"_a = 1,
           "facts"_a = std::vector<std::pair<std::string, std::string>>(), "offer_ttl_s"_a = 120.0,
           "grant_ttl_s"_a = 240.0, "retry_grace_s"_a = 5.0, "keepalive_s"_a = 1.0,
           "peer_timeout_s"_a = 10.0, "fence_margin_s"_a = 2.0, "resend_s"_a = 2.0,
           "revoke_patience_s"_a = 20.0, "max_batch_descriptors"_a = 1024,
           "max_batch_bytes"_a = 32U << 20, "max_handles_in_flight"_a = 64,
           "max_prepared_blocks"_a = 8U << 20, "spin_us"_a = 50.0, "busy_poll_us"_a = 20.0,
           "idle_poll_us"_a = 1000.0, "thread_policy"_a = "batch", "push_granularity_tokens"_a = 0,
           "min_push_tokens"_a = 0, "mode"_a = "push")
      .def_property_readonly("session", [](const PyConfig& config) { return config.self.session; })
      .def_property_readonly("engine_id",
                             [](const PyConfig& config) { return config.self.engine_id; });
}

PeerInfo decode_peer(const py::bytes& blob) {
  Result<PeerInfo> info = decode_peer_info(bytes_from(blob));
  throw_if_error(info.status());
  return std::move(info.value());
}

void bind_peer_info(py::module_& m) {
  py::class_<PeerInfo>(m, "PeerInfo", py::is_final())
      .def_static("decode", &decode_peer, "blob"_a)
      .def_readonly("session", &PeerInfo::session)
      .def_readonly("engine_id", &PeerInfo::engine_id)
      .def_readonly("tp_rank", &PeerInfo::tp_rank)
      .def_readonly("tp_size", &PeerInfo::tp_size)
      .def_readonly("pp_rank", &PeerInfo::pp_rank)
      .def_readonly("pp_size", &PeerInfo::pp_size)
      .def_readonly("facts", &PeerInfo::facts)
      .def_readonly("regions", &PeerInfo::regions);
}

struct PyEvent {
  std::string kind;
  Ticket ticket = 0;
  std::string reason = "none";
  std::string detail;
  Session session = 0;
  PostStats stats;
};

PyEvent to_python(EngineEvent&& event) {
  PyEvent out;
  if (auto* lost = std::get_if<PeerLostEvent>(&event)) {
    out.kind = "peer_lost";
    out.reason = reason_name(Reason::kPeerLost);
    out.detail = std::move(lost->why);
    out.session = lost->session;
    return out;
  }
  auto& end = std::get<EndAction>(event);
  static constexpr const char* kGrantKinds[] = {"received", "receive_failed", "receive_revoked"};
  static constexpr const char* kOfferKinds[] = {"sent", "send_failed", "send_failed"};
  const auto index = static_cast<std::size_t>(end.end);
  out.kind = end.is_grant ? kGrantKinds[index] : kOfferKinds[index];
  out.ticket = end.ticket;
  out.reason = reason_name(end.reason);
  out.detail = std::move(end.detail);
  out.session = end.peer;
  out.stats = end.stats;
  return out;
}

void bind_event(py::module_& m) {
  const auto micros = [](std::int64_t ns) { return static_cast<double>(ns) / 1e3; };
  py::class_<PyEvent>(m, "Event", py::is_final())
      .def_readonly("kind", &PyEvent::kind)
      .def_readonly("ticket", &PyEvent::ticket)
      .def_readonly("reason", &PyEvent::reason)
      .def_readonly("detail", &PyEvent::detail)
      .def_readonly("session", &PyEvent::session)
      .def_property_readonly("bytes", [](const PyEvent& e) { return e.stats.bytes; })
      .def_property_readonly("descriptors_before",
                             [](const PyEvent& e) { return e.stats.descriptors_before; })
      .def_property_readonly("descriptors", [](const PyEvent& e) { return e.stats.descriptors; })
      .def_property_readonly("plan_us", [=](const PyEvent& e) { return micros(e.stats.plan_ns); })
      .def_property_readonly("post_us", [=](const PyEvent& e) { return micros(e.stats.post_ns); })
      .def_property_readonly("transfer_us",
                             [=](const PyEvent& e) { return micros(e.stats.transfer_ns); })
      .def_property_readonly("moved",
                             [](const PyEvent& e) -> py::object {
                               const PostStats& s = e.stats;
                               if (s.bytes == 0) {
                                 return py::none();
                               }
                               return py::make_tuple(s.bytes, s.descriptors_before, s.descriptors,
                                                     1e-9 * static_cast<double>(s.plan_ns),
                                                     1e-9 * static_cast<double>(s.post_ns),
                                                     1e-9 * static_cast<double>(s.transfer_ns));
                             })
      .def_property_readonly("first_post_ns", [](const PyEvent& e) { return e.stats.first_post; })
      .def_property_readonly("last_post_ns", [](const PyEvent& e) { return e.stats.last_post; })
      .def("__repr__", [](const PyEvent& e) {
        return "Event(kind='" + e.kind + "', ticket=" + std::to_string(e.ticket) + ", reason='" +
               e.reason + "', detail='" + e.detail + "')";
      });
}

class PyEngine {
 public:
  explicit PyEngine(PyConfig config)
      : config_(std::move(config)), thread_(config_.engine, config_.loop) {}

  void start(
      std::vector<Region> regions,
      const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::string, std::uint32_t>>&
          memory) {
    bool on_device = false;
    for (std::size_t i = 0; i < regions.size(); ++i) {
      throw_if_error(validate_region(regions[i], i));
      on_device = on_device || regions[i].memory == MemoryKind::kDevice;
    }
    std::vector<MemoryRange> ranges;
    for (const auto& [address, length, kind, device] : memory) {
      ranges.push_back({address, length, memory_kind(kind), device});
    }
    PeerInfo self = config_.self;
    self.regions = std::move(regions);
    Status status;
    {
      const py::gil_scoped_release release;
      status = start_native(std::move(self), std::move(ranges), on_device);
    }
    if (!status.is_ok()) {
      throw std::runtime_error(status.message());
    }
  }

  py::bytes peer_info() const { return bytes_to(thread_.peer_info()); }

  std::vector<Session> connect(const std::vector<py::bytes>& producers,
                               const std::vector<py::bytes>& consumers, std::size_t consumer_index,
                               double timeout_s) {
    std::vector<PeerInfo> from;
    std::vector<PeerInfo> to;
    for (const py::bytes& blob : producers) {
      from.push_back(decode_peer(blob));
    }
    for (const py::bytes& blob : consumers) {
      to.push_back(decode_peer(blob));
    }
    const DurationNs timeout = seconds("timeout_s", timeout_s);
    ConnectResult result;
    std::vector<Session> sessions;
    {
      const py::gil_scoped_release release;
      Result<std::vector<PeerTarget>> targets = find_targets(from, to, consumer_index);
      result.status = targets.status();
      if (targets.is_ok()) {
        for (const PeerTarget& target : targets.value()) {
          sessions.push_back(target.info.session);
        }
        result = thread_.connect(std::move(targets.value()), timeout);
      }
    }
    throw_if_not_met(result.status);
    return sessions;
  }

  void grant(Ticket ticket, const std::string& transfer_id, const py::bytes& fingerprint,
             Attempt attempt, std::vector<Session> sessions,
             std::pair<std::uint32_t, std::uint32_t> span, const py::sequence& blocks,
             double deadline_s) {
    if (attempt == 0) {
      throw py::value_error("attempt is 0; it must be a nonzero random number");
    }
    GrantCommand command;
    command.ticket = ticket;
    command.attempt = attempt;
    command.key = key_from(transfer_id, fingerprint);
    command.span = span_from(span);
    command.blocks = block_table_from(blocks);
    command.writers = std::move(sessions);
    command.deadline = monotonic_now() + seconds("deadline_s", deadline_s);
    submit(std::move(command));
  }

  void revoke(Ticket ticket) { submit(RevokeCommand{ticket}); }

  void cork() { is_corked_ = true; }
  void uncork() {
    is_corked_ = false;
    thread_.submit_all(corked_);
  }

  void offer(Ticket ticket, const std::string& transfer_id, const py::bytes& fingerprint,
             const py::sequence& new_blocks, std::uint32_t watermark, bool final) {
    submit(make_offer(ticket, transfer_id, fingerprint, new_blocks, watermark, final, 0, 0));
  }

  std::uint64_t offer_all(const std::vector<py::tuple>& offers, DeviceEvent device_event) {
    const std::uint64_t fence = next_fence_;
    std::vector<Command> commands;
    commands.reserve(offers.size());
    for (const py::tuple& offer : offers) {
      if (offer.size() != 6) {
        throw py::value_error("an offer has " + std::to_string(offer.size()) +
                              " fields; it must have 6");
      }
      commands.emplace_back(make_offer(offer[0].cast<Ticket>(), offer[1].cast<std::string>(),
                                       offer[2].cast<py::bytes>(), offer[3].cast<py::sequence>(),
                                       offer[4].cast<std::uint32_t>(), offer[5].cast<bool>(),
                                       device_event, fence));
    }
    ++next_fence_;
    thread_.submit_all(commands);
    return fence;
  }

  std::vector<Ticket> rewind(std::vector<Ticket> tickets, double timeout_s) {
    const DurationNs timeout = seconds("timeout_s", timeout_s);
    const py::gil_scoped_release release;
    return thread_.rewind(std::move(tickets), timeout);
  }

  std::uint64_t fences_passed() const { return thread_.fences_passed(); }
  bool has_events() const { return thread_.has_events(); }

  void withdraw(Ticket ticket, const std::string& reason, const std::string& transfer_id,
                const py::bytes& fingerprint) {
    WithdrawCommand command;
    command.ticket = ticket;
    command.reason = reason_from(reason);
    command.has_key = !transfer_id.empty();
    if (command.has_key) {
      command.key = key_from(transfer_id, fingerprint);
    }
    submit(std::move(command));
  }

  std::vector<PyEvent> poll() {
    std::vector<PyEvent> out;
    if (!thread_.has_events()) {
      return out;
    }
    std::vector<EngineEvent> events;
    thread_.poll(events);
    out.reserve(events.size());
    for (EngineEvent& event : events) {
      out.push_back(to_python(std::move(event)));
    }
    return out;
  }

  py::dict counters() const {
    const EngineCounters c = thread_.counters();
    return py::dict(
        "grants_live"_a = c.grants_live, "offers_live"_a = c.offers_live,
        "served_live"_a = c.served_live, "handles_in_flight"_a = c.handles_in_flight,
        "posts_queued"_a = c.posts_queued, "fences_waiting"_a = c.fences_waiting,
        "peers"_a = c.peers, "prepared_blocks"_a = c.prepared_blocks,
        "transfers_received"_a = c.transfers_received, "transfers_sent"_a = c.transfers_sent,
        "transfers_failed"_a = c.transfers_failed, "bytes_written"_a = c.bytes_written,
        "descriptors_planned"_a = c.descriptors_planned,
        "descriptors_posted"_a = c.descriptors_posted, "writes_posted"_a = c.writes_posted,
        "bytes_read"_a = c.bytes_read, "reads_posted"_a = c.reads_posted,
        "posted_from_lists"_a = c.posted_from_lists, "messages_received"_a = c.messages_received,
        "messages_dropped"_a = c.messages_dropped, "peers_lost"_a = c.peers_lost);
  }

  void shutdown(double drain_s) {
    const DurationNs drain = seconds("drain_s", drain_s);
    const py::gil_scoped_release release;
    thread_.shutdown(drain);
  }

 private:
  void submit(Command command) {
    if (is_corked_) {
      corked_.push_back(std::move(command));
    } else {
      thread_.submit(std::move(command));
    }
  }

  static FencedOfferCommand make_offer(Ticket ticket, const std::string& transfer_id,
                                       const py::bytes& fingerprint, const py::sequence& new_blocks,
                                       std::uint32_t watermark, bool final, DeviceEvent event,
                                       std::uint64_t fence) {
    FencedOfferCommand command;
    command.offer.ticket = ticket;
    command.offer.key = key_from(transfer_id, fingerprint);
    command.offer.new_blocks = block_table_from(new_blocks);
    command.offer.watermark = watermark;
    command.offer.final = final;
    command.event = event;
    command.fence = fence;
    return command;
  }

  Status start_native(PeerInfo self, std::vector<MemoryRange> ranges, bool on_device) {
    Result<std::unique_ptr<DeviceFence>> fence =
        on_device ? make_cuda_fence() : Result<std::unique_ptr<DeviceFence>>(make_host_fence());
    if (!fence.is_ok()) {
      return fence.status();
    }
    auto factory = [this]() -> Result<std::unique_ptr<Transport>> {
      auto library = NixlLibrary::open(config_.nixl_library);
      if (!library.is_ok()) {
        return library.status();
      }
      auto transport = NixlTransport::create(library.value(), config_.transport);
      if (!transport.is_ok()) {
        return transport.status();
      }
      return std::unique_ptr<Transport>(std::move(transport.value()));
    };
    return thread_.start(std::move(factory), std::move(fence.value()), std::move(ranges),
                         std::move(self));
  }

  PyConfig config_;
  EngineThread thread_;
  // Guarded by the GIL.
  std::uint64_t next_fence_ = 1;
  bool is_corked_ = false;
  std::vector<Command> corked_;
};

void bind_engine(py::module_& m) {
  py::class_<PyEngine>(m, "Engine", py::is_final())
      .def(py::init<PyConfig>(), "config"_a)
      .def("start", &PyEngine::start, "regions"_a, "memory"_a)
      .def("peer_info", &PyEngine::peer_info)
      .def("connect", &PyEngine::connect, "producers"_a, "consumers"_a, "consumer_index"_a,
           "timeout_s"_a)
      .def("grant", &PyEngine::grant, "ticket"_a, "transfer_id"_a, "fingerprint"_a, "attempt"_a,
           "sessions"_a, "span"_a, "blocks"_a, "deadline_s"_a)
      .def("revoke", &PyEngine::revoke, "ticket"_a)
      .def("offer", &PyEngine::offer, "ticket"_a, "transfer_id"_a, "fingerprint"_a, "new_blocks"_a,
           "watermark"_a, "final"_a)
      .def("offer_all", &PyEngine::offer_all, "offers"_a, "device_event"_a = 0)
      .def("rewind", &PyEngine::rewind, "tickets"_a, "timeout_s"_a)
      .def("fences_passed", &PyEngine::fences_passed)
      .def("withdraw", &PyEngine::withdraw, "ticket"_a, "reason"_a, "transfer_id"_a = "",
           "fingerprint"_a = py::bytes())
      .def("cork", &PyEngine::cork)
      .def("uncork", &PyEngine::uncork)
      .def("has_events", &PyEngine::has_events)
      .def("poll", &PyEngine::poll)
      .def("counters", &PyEngine::counters)
      .def("shutdown", &PyEngine::shutdown, "drain_s"_a);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Native part of kvpush; see _core.pyi for the types and their documentation.";
  m.attr("__version__") = KVPUSH_VERSION;
  bind_region(m);
  bind_planner(m);
  bind_config(m);
  bind_peer_info(m);
  bind_event(m);
  bind_engine(m);
}

}  // namespace kvpush
