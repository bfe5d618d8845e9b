// NixlLibrary: NIXL's C API as one table of functions, opened at run time.
//
// Declares only what kvpush calls. The signatures are the same in NIXL 1.0.1 to 1.5.1, all of which
// export these symbols; status values below zero are errors, and newer releases add more of them.
// Immutable once open: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "dynamic_library.h"
#include "memory.h"
#include "status.h"

namespace kvpush {

// Opaque objects of the C API.
struct NixlAgent;
struct NixlBackend;
struct NixlParams;
struct NixlOptArgs;
struct NixlRegList;
struct NixlXferList;
struct NixlPreparedList;
struct NixlXferRequest;
struct NixlNotifMap;

using NixlStatus = int;
constexpr NixlStatus kNixlSuccess = 0;
constexpr NixlStatus kNixlInProgress = 1;
constexpr NixlStatus kNixlBackendError = -2;

// A readable name for any status value, known or not.
std::string_view nixl_status_name(NixlStatus status) noexcept;

enum class NixlMemory : int { kDram = 0, kVram = 1 };
constexpr NixlMemory nixl_memory(MemoryKind kind) noexcept {
  return kind == MemoryKind::kDevice ? NixlMemory::kVram : NixlMemory::kDram;
}
enum class NixlOperation : int { kRead = 0, kWrite = 1 };

// Passed by address, so its layout is part of the library's interface.
struct NixlAgentConfig {
  bool enable_progress_thread = false;
  bool enable_listen_thread = false;
  int listen_port = 0;
  int thread_sync = 0;  // 0: the caller serialises every call
  unsigned num_workers = 1;
  std::uint64_t progress_thread_delay_us = 0;
  std::uint64_t listen_thread_delay_us = 0;
  bool capture_telemetry = false;
};

// Every function of the library that kvpush calls. Strings are NUL-terminated; blobs handed out
// through `void**` or `char**` are the caller's to free().
struct NixlFunctions {
  bool (*is_stub)();

  NixlStatus (*create_configured_agent)(const char* name, const NixlAgentConfig* config,
                                        NixlAgent** agent);
  NixlStatus (*destroy_agent)(NixlAgent* agent);

  NixlStatus (*create_params)(NixlParams** params);
  NixlStatus (*params_add)(NixlParams* params, const char* key, const char* value);
  NixlStatus (*destroy_params)(NixlParams* params);
  NixlStatus (*create_backend)(NixlAgent* agent, const char* plugin, NixlParams* params,
                               NixlBackend** backend);
  NixlStatus (*destroy_backend)(NixlBackend* backend);

  NixlStatus (*create_opt_args)(NixlOptArgs** args);
  NixlStatus (*destroy_opt_args)(NixlOptArgs* args);
  NixlStatus (*opt_args_add_backend)(NixlOptArgs* args, NixlBackend* backend);
  NixlStatus (*opt_args_set_has_notif)(NixlOptArgs* args, bool has_notif);
  NixlStatus (*opt_args_set_notif_msg)(NixlOptArgs* args, const void* data, std::size_t length);
  NixlStatus (*opt_args_set_skip_desc_merge)(NixlOptArgs* args, bool skip);

  NixlStatus (*create_reg_dlist)(NixlMemory memory, NixlRegList** list);
  NixlStatus (*reg_dlist_add_desc)(NixlRegList* list, std::uintptr_t address, std::size_t length,
                                   std::uint64_t device, const void* metadata,
                                   std::size_t metadata_length);
  NixlStatus (*destroy_reg_dlist)(NixlRegList* list);
  NixlStatus (*register_mem)(NixlAgent* agent, NixlRegList* list, NixlOptArgs* args);
  NixlStatus (*deregister_mem)(NixlAgent* agent, NixlRegList* list, NixlOptArgs* args);

  NixlStatus (*get_local_md)(NixlAgent* agent, void** data, std::size_t* length);
  NixlStatus (*load_remote_md)(NixlAgent* agent, const void* data, std::size_t length,
                               char** agent_name);
  NixlStatus (*check_remote_md)(NixlAgent* agent, const char* name, NixlXferList* list);
  NixlStatus (*invalidate_remote_md)(NixlAgent* agent, const char* name);

  NixlStatus (*create_xfer_dlist)(NixlMemory memory, NixlXferList** list);
  NixlStatus (*xfer_dlist_add_desc)(NixlXferList* list, std::uintptr_t address, std::size_t length,
                                    std::uint64_t device);
  NixlStatus (*xfer_dlist_clear)(NixlXferList* list);
  NixlStatus (*xfer_dlist_resize)(NixlXferList* list, std::size_t size);
  NixlStatus (*destroy_xfer_dlist)(NixlXferList* list);

  // `agent_name` is empty for this side's memory.
  NixlStatus (*prep_xfer_dlist)(NixlAgent* agent, const char* agent_name, NixlXferList* list,
                                NixlPreparedList** prepared, NixlOptArgs* args);
  NixlStatus (*release_xfer_dlist_handle)(NixlAgent* agent, NixlPreparedList* prepared);
  NixlStatus (*make_xfer_req)(NixlAgent* agent, NixlOperation operation, NixlPreparedList* local,
                              const int* local_indices, std::size_t local_count,
                              NixlPreparedList* remote, const int* remote_indices,
                              std::size_t remote_count, NixlXferRequest** request,
                              NixlOptArgs* args);

  NixlStatus (*create_xfer_req)(NixlAgent* agent, NixlOperation operation, NixlXferList* local,
                                NixlXferList* remote, const char* remote_agent,
                                NixlXferRequest** request, NixlOptArgs* args);
  NixlStatus (*post_xfer_req)(NixlAgent* agent, NixlXferRequest* request, NixlOptArgs* args);
  NixlStatus (*get_xfer_status)(NixlAgent* agent, NixlXferRequest* request);
  NixlStatus (*release_xfer_req)(NixlAgent* agent, NixlXferRequest* request);
  NixlStatus (*destroy_xfer_req)(NixlXferRequest* request);

  NixlStatus (*gen_notif)(NixlAgent* agent, const char* remote_agent, const void* data,
                          std::size_t length, NixlOptArgs* args);
  NixlStatus (*create_notif_map)(NixlNotifMap** map);
  NixlStatus (*destroy_notif_map)(NixlNotifMap* map);
  NixlStatus (*get_notifs)(NixlAgent* agent, NixlNotifMap* map, NixlOptArgs* args);
  NixlStatus (*notif_map_size)(NixlNotifMap* map, std::size_t* size);
  NixlStatus (*notif_map_get_agent_at)(NixlNotifMap* map, std::size_t index, const char** name);
  NixlStatus (*notif_map_get_notifs_size)(NixlNotifMap* map, const char* name, std::size_t* size);
  NixlStatus (*notif_map_get_notif)(NixlNotifMap* map, const char* name, std::size_t index,
                                    const void** data, std::size_t* length);
  NixlStatus (*notif_map_clear)(NixlNotifMap* map);
};

class NixlLibrary {
 public:
  // `path`: absolute path of libnixl_capi.so. Errors name the path, the symbol, and the loader's
  // reason; a stub build of the library, which can do nothing, is an error too.
  static Result<std::shared_ptr<const NixlLibrary>> open(const std::string& path);

  const std::string& path() const noexcept { return library_.path(); }
  const NixlFunctions* operator->() const noexcept { return &functions_; }

 private:
  explicit NixlLibrary(DynamicLibrary library) : library_(std::move(library)) {}
  Status resolve_all();

  DynamicLibrary library_;
  NixlFunctions functions_{};
};

}  // namespace kvpush
