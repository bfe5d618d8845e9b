#include "nixl_lists.h"

#include <utility>

namespace kvpush {
namespace {

NixlStatus add_blocks(const NixlLibrary& nixl, const BlockSeries& blocks, std::uint64_t block_bytes,
                      NixlXferList* list) {
  // Makes room for all of them at once; a list can't be told to otherwise.
  NixlStatus status = nixl->xfer_dlist_resize(list, blocks.size());
  if (status == kNixlSuccess) status = nixl->xfer_dlist_clear(list);
  for (const std::uint64_t base : blocks.bases) {
    for (std::uint32_t i = 0; i < blocks.num_blocks && status == kNixlSuccess; ++i)
      status =
          nixl->xfer_dlist_add_desc(list, base + i * blocks.stride, block_bytes, blocks.device);
  }
  return status;
}

// `agent_name` is empty for this side.
NixlStatus prepare_side(const NixlLibrary& nixl, NixlAgent* agent, const std::string& agent_name,
                        const BlockSeries& blocks, std::uint64_t block_bytes, NixlOptArgs* args,
                        NixlPreparedList*& prepared) {
  NixlXferList* list = nullptr;
  NixlStatus status = nixl->create_xfer_dlist(nixl_memory(blocks.kind), &list);
  if (status != kNixlSuccess) return status;
  status = add_blocks(nixl, blocks, block_bytes, list);
  // Up to 1.4.1 what an early failure leaves in `made` must not be released.
  NixlPreparedList* made = nullptr;
  if (status == kNixlSuccess)
    status = nixl->prep_xfer_dlist(agent, agent_name.c_str(), list, &made, args);
  if (status == kNixlSuccess) prepared = made;
  nixl->destroy_xfer_dlist(list);
  return status;
}

}  // namespace

Result<NixlLists> NixlLists::prepare(const NixlLibrary& nixl, NixlAgent* agent, NixlOptArgs* args,
                                     const std::string& peer_name, const BlockGrid& grid) {
  NixlLists lists(nixl, agent);
  const char* side = "this side's";
  NixlStatus status =
      prepare_side(nixl, agent, "", grid.local, grid.block_bytes, args, lists.local_);
  if (status == kNixlSuccess) {
    side = "the peer's";
    status =
        prepare_side(nixl, agent, peer_name, grid.remote, grid.block_bytes, args, lists.remote_);
  }
  if (status == kNixlSuccess) return lists;
  return Status::error(std::string("cannot prepare a list of ") + side + " blocks for peer '" +
                       peer_name + "': NIXL reports '" + std::string(nixl_status_name(status)) +
                       "'");
}

NixlLists::NixlLists(NixlLists&& other) noexcept
    : nixl_(other.nixl_),
      agent_(other.agent_),
      local_(std::exchange(other.local_, nullptr)),
      remote_(std::exchange(other.remote_, nullptr)) {}

NixlLists::~NixlLists() {
  if (local_ != nullptr) nixl_->release_xfer_dlist_handle(agent_, local_);
  if (remote_ != nullptr) nixl_->release_xfer_dlist_handle(agent_, remote_);
}

NixlStatus NixlLists::make_request(NixlOperation operation, const CopyBatch& batch,
                                   NixlOptArgs* args, NixlXferRequest** request) const {
  const NixlStatus set = nixl_->opt_args_set_skip_desc_merge(args, !batch.adjoining);
  if (set != kNixlSuccess) return set;
  return nixl_->make_xfer_req(agent_, operation, local_, batch.local_blocks.data(),
                              batch.local_blocks.size(), remote_, batch.remote_blocks.data(),
                              batch.remote_blocks.size(), request, args);
}

}  // namespace kvpush
