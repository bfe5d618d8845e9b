#include "nixl_library.h"

#include <utility>

namespace kvpush {

std::string_view nixl_status_name(NixlStatus status) noexcept {
  switch (status) {
    case 1:
      return "in progress";
    case 0:
      return "success";
    case -1:
      return "invalid parameter";
    case -2:
      return "backend error";
    case -3:
      return "invalid state";
    case -4:
      return "exception";
    case -5:
      return "no telemetry";
    case -6:
      return "not found";
    default:
      return "unknown status";
  }
}

namespace {

// Looks symbols up one after the other and keeps the first failure.
class Resolver {
 public:
  explicit Resolver(const DynamicLibrary& library) : library_(library) {}

  template <typename Function>
  void operator()(const char* symbol, Function*& function) {
    if (status_.is_ok()) status_ = library_.resolve(symbol, function);
  }
  Status status() const { return status_; }

 private:
  const DynamicLibrary& library_;
  Status status_;
};

void resolve_objects(Resolver& resolve, NixlFunctions& f) {
  resolve("nixl_capi_create_configured_agent", f.create_configured_agent);
  resolve("nixl_capi_destroy_agent", f.destroy_agent);
  resolve("nixl_capi_create_params", f.create_params);
  resolve("nixl_capi_params_add", f.params_add);
  resolve("nixl_capi_destroy_params", f.destroy_params);
  resolve("nixl_capi_create_backend", f.create_backend);
  resolve("nixl_capi_destroy_backend", f.destroy_backend);
  resolve("nixl_capi_create_opt_args", f.create_opt_args);
  resolve("nixl_capi_destroy_opt_args", f.destroy_opt_args);
  resolve("nixl_capi_opt_args_add_backend", f.opt_args_add_backend);
  resolve("nixl_capi_opt_args_set_has_notif", f.opt_args_set_has_notif);
  resolve("nixl_capi_opt_args_set_notif_msg", f.opt_args_set_notif_msg);
  resolve("nixl_capi_opt_args_set_skip_desc_merge", f.opt_args_set_skip_desc_merge);
  resolve("nixl_capi_create_reg_dlist", f.create_reg_dlist);
  resolve("nixl_capi_reg_dlist_add_desc", f.reg_dlist_add_desc);
  resolve("nixl_capi_destroy_reg_dlist", f.destroy_reg_dlist);
  resolve("nixl_capi_create_xfer_dlist", f.create_xfer_dlist);
  resolve("nixl_capi_xfer_dlist_add_desc", f.xfer_dlist_add_desc);
  resolve("nixl_capi_xfer_dlist_clear", f.xfer_dlist_clear);
  resolve("nixl_capi_xfer_dlist_resize", f.xfer_dlist_resize);
  resolve("nixl_capi_destroy_xfer_dlist", f.destroy_xfer_dlist);
  resolve("nixl_capi_create_notif_map", f.create_notif_map);
  resolve("nixl_capi_destroy_notif_map", f.destroy_notif_map);
}

void resolve_operations(Resolver& resolve, NixlFunctions& f) {
  resolve("nixl_capi_register_mem", f.register_mem);
  resolve("nixl_capi_deregister_mem", f.deregister_mem);
  resolve("nixl_capi_get_local_md", f.get_local_md);
  resolve("nixl_capi_load_remote_md", f.load_remote_md);
  resolve("nixl_capi_check_remote_md", f.check_remote_md);
  resolve("nixl_capi_invalidate_remote_md", f.invalidate_remote_md);
  resolve("nixl_capi_prep_xfer_dlist", f.prep_xfer_dlist);
  resolve("nixl_capi_release_xfer_dlist_handle", f.release_xfer_dlist_handle);
  resolve("nixl_capi_make_xfer_req", f.make_xfer_req);
  resolve("nixl_capi_create_xfer_req", f.create_xfer_req);
  resolve("nixl_capi_post_xfer_req", f.post_xfer_req);
  resolve("nixl_capi_get_xfer_status", f.get_xfer_status);
  resolve("nixl_capi_release_xfer_req", f.release_xfer_req);
  resolve("nixl_capi_destroy_xfer_req", f.destroy_xfer_req);
  resolve("nixl_capi_gen_notif", f.gen_notif);
  resolve("nixl_capi_get_notifs", f.get_notifs);
  resolve("nixl_capi_notif_map_size", f.notif_map_size);
  resolve("nixl_capi_notif_map_get_agent_at", f.notif_map_get_agent_at);
  resolve("nixl_capi_notif_map_get_notifs_size", f.notif_map_get_notifs_size);
  resolve("nixl_capi_notif_map_get_notif", f.notif_map_get_notif);
  resolve("nixl_capi_notif_map_clear", f.notif_map_clear);
}

}  // namespace

Status NixlLibrary::resolve_all() {
  Resolver resolve(library_);
  resolve("nixl_capi_is_stub", functions_.is_stub);
  if (resolve.status().is_ok() && functions_.is_stub()) {
    return Status::error(path() +
                         " is NIXL's stub library, which does nothing: install NIXL itself "
                         "(pip install nixl)");
  }
  resolve_objects(resolve, functions_);
  resolve_operations(resolve, functions_);
  if (resolve.status().is_ok()) return Status::ok();
  return Status::error(resolve.status().message() + " (kvpush needs NIXL 1.0.1 or newer)");
}

Result<std::shared_ptr<const NixlLibrary>> NixlLibrary::open(const std::string& path) {
  // A bare name would let the loader pick any NIXL, with plugins that belong to another.
  if (path.empty() || path.front() != '/') {
    return Status::error("NIXL's library must be named by its absolute path, not '" + path + "'");
  }
  Result<DynamicLibrary> opened = DynamicLibrary::open(path);
  if (!opened.is_ok()) return opened.status();

  std::shared_ptr<NixlLibrary> library(new NixlLibrary(std::move(opened.value())));
  if (Status status = library->resolve_all(); !status.is_ok()) return status;
  return std::shared_ptr<const NixlLibrary>(std::move(library));
}

}  // namespace kvpush
