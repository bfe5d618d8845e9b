// NixlLists: NIXL's prepared lists of all blocks of a grid, on this side and at one peer. A handle
// is then made from the indices of its blocks.
//
// From NIXL 1.4 on such a list is kept as a few strides; before, with 32 bytes for each block. Up
// to 1.4.1 the C API never frees the 8 bytes it puts around a list. Thread: the transport's.
#pragma once

#include <string>

#include "memory.h"
#include "nixl_library.h"
#include "status.h"

namespace kvpush {

class NixlLists {
 public:
  // The library and the agent must outlive what is made. Errors name the side.
  static Result<NixlLists> prepare(const NixlLibrary& nixl, NixlAgent* agent, NixlOptArgs* args,
                                   const std::string& peer_name, const BlockGrid& grid);
  NixlLists(NixlLists&& other) noexcept;
  NixlLists& operator=(NixlLists&&) = delete;
  ~NixlLists();

  // The request of these blocks, one to one. Of `args`, merging is set. NIXL checks the indices.
  NixlStatus make_request(NixlOperation operation, const CopyBatch& batch, NixlOptArgs* args,
                          NixlXferRequest** request) const;

 private:
  NixlLists(const NixlLibrary& nixl, NixlAgent* agent) : nixl_(nixl), agent_(agent) {}

  const NixlLibrary& nixl_;
  NixlAgent* agent_;
  NixlPreparedList* local_ = nullptr;   // owned
  NixlPreparedList* remote_ = nullptr;  // owned
};

}  // namespace kvpush
