// What kvpush does without: NIXL's lists of every block of both sides, prepared when two engines
// meet, and handles made from indices into them. Measured for comparison only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "check.h"
#include "clock.h"
#include "dynamic_library.h"
#include "nixl_library.h"

namespace kvpush::bench {

struct NixlPreparedList;

class PreparedLists {
 public:
  PreparedLists(std::shared_ptr<const NixlLibrary> library, NixlAgent* agent, NixlOptArgs* args,
                std::string peer)
      : nixl_(std::move(library)), agent_(agent), args_(args), peer_(std::move(peer)) {
    const Result<DynamicLibrary> opened = DynamicLibrary::open(nixl_->path());
    KVPUSH_CHECK(opened.is_ok(), "the library is open already");
    KVPUSH_CHECK(opened.value().resolve("nixl_capi_prep_xfer_dlist", prepare_).is_ok() &&
                     opened.value().resolve("nixl_capi_make_xfer_req", make_).is_ok(),
                 "NIXL has prepared lists");
  }

  void prepare(std::uint64_t local, std::uint64_t remote, std::size_t blocks,
               std::uint64_t block_bytes) {
    const TimeNs start = monotonic_now();
    local_ = prepare_side("", local, blocks, block_bytes);
    remote_ = prepare_side(peer_.c_str(), remote, blocks, block_bytes);
    prepare_s_ = static_cast<double>(monotonic_now() - start) / static_cast<double>(kSecond);
  }

  // The caller's to destroy.
  NixlXferRequest* make(std::span<const int> local, std::span<const int> remote) const {
    NixlXferRequest* request = nullptr;
    const NixlStatus status =
        make_(agent_, NixlOperation::kWrite, local_, local.data(), local.size(), remote_,
              remote.data(), remote.size(), &request, args_);
    KVPUSH_CHECK(status == kNixlSuccess, "every block is in the lists");
    return request;
  }

  double prepare_s() const noexcept { return prepare_s_; }

 private:
  NixlPreparedList* prepare_side(const char* name, std::uint64_t base, std::size_t blocks,
                                 std::uint64_t block_bytes) const {
    NixlXferList* list = nullptr;
    NixlStatus status = (*nixl_)->create_xfer_dlist(NixlMemory::kDram, &list);
    for (std::size_t i = 0; i < blocks && status == kNixlSuccess; ++i)
      status = (*nixl_)->xfer_dlist_add_desc(list, base + i * block_bytes, block_bytes, 0);
    NixlPreparedList* prepared = nullptr;
    if (status == kNixlSuccess) status = prepare_(agent_, name, list, &prepared, args_);
    KVPUSH_CHECK(status == kNixlSuccess, "all blocks lie in registered memory");
    (*nixl_)->destroy_xfer_dlist(list);
    return prepared;  // kept to the end of the process
  }

  std::shared_ptr<const NixlLibrary> nixl_;
  NixlAgent* agent_;
  NixlOptArgs* args_;
  std::string peer_;
  double prepare_s_ = 0;
  NixlPreparedList* local_ = nullptr;
  NixlPreparedList* remote_ = nullptr;
  NixlStatus (*prepare_)(NixlAgent*, const char*, NixlXferList*, NixlPreparedList**,
                         NixlOptArgs*) = nullptr;
  NixlStatus (*make_)(NixlAgent*, NixlOperation, NixlPreparedList*, const int*, std::size_t,
                      NixlPreparedList*, const int*, std::size_t, NixlXferRequest**,
                      NixlOptArgs*) = nullptr;
};

}  // namespace kvpush::bench
