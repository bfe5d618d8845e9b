#include "region.h"

#include <algorithm>
#include <array>
#include <limits>

namespace kvpush {
namespace {

struct Axis {
  const char* extent_name;
  const char* stride_name;
  std::uint64_t extent;
  std::uint64_t stride;
};

Status wrong(const Region& region, std::size_t index, const std::string& what) {
  return Status::error("region " + std::to_string(index) + " (layer '" + region.layer +
                       "'): " + what);
}

Status wrong_value(const Region& region, std::size_t index, const char* field, std::uint64_t value,
                   const std::string& must) {
  return wrong(region, index, std::string(field) + " is " + std::to_string(value) + ", " + must);
}

// Strides don't overlap when, from the smallest up, each steps over all that lies inside it.
Status check_layout(const Region& region, std::size_t index, std::span<Axis> axes,
                    const char* content_name, std::uint64_t content) {
  std::sort(axes.begin(), axes.end(),
            [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  std::uint64_t reach = content;  // bytes from the first to the last of what is inside
  for (const Axis& axis : axes) {
    if (axis.extent == 1) continue;
    if (axis.stride < reach) {
      return wrong_value(region, index, axis.stride_name, axis.stride,
                         "less than the " + std::to_string(reach) + " bytes it must step over (" +
                             content_name + " is " + std::to_string(content) + ")");
    }
    std::uint64_t step = 0;
    if (__builtin_mul_overflow(axis.extent - 1, axis.stride, &step) ||
        __builtin_add_overflow(reach, step, &reach)) {
      return wrong_value(region, index, axis.stride_name, axis.stride,
                         std::string("too large for ") + axis.extent_name + " " +
                             std::to_string(axis.extent) + ": the region's size overflows 64 bits");
    }
  }
  std::uint64_t end = 0;
  if (__builtin_add_overflow(region.base, reach, &end)) {
    return wrong_value(region, index, "base", region.base,
                       "and its " + std::to_string(reach) + " bytes overflow 64 bits");
  }
  return Status::ok();
}

Status check_state(const Region& region, std::size_t index) {
  if (region.state_bytes == 0) {
    return wrong_value(region, index, "state_bytes", 0, "must be positive");
  }
  std::array axes{Axis{"num_blocks", "block_stride", region.num_blocks, region.block_stride}};
  return check_layout(region, index, axes, "state_bytes", region.state_bytes);
}

Status check_tokens(const Region& region, std::size_t index) {
  if (region.tokens_per_block == 0 || region.tokens_per_block > kMaxTokensPerBlock) {
    return wrong_value(region, index, "tokens_per_block", region.tokens_per_block,
                       "must be 1 to " + std::to_string(kMaxTokensPerBlock));
  }
  if (region.tokens_per_page == 0 || region.tokens_per_block % region.tokens_per_page != 0) {
    return wrong_value(region, index, "tokens_per_page", region.tokens_per_page,
                       "must divide tokens_per_block " + std::to_string(region.tokens_per_block));
  }
  return Status::ok();
}

Status check_heads(const Region& region, std::size_t index) {
  if (region.components == 0 || region.components > kMaxComponents) {
    return wrong_value(region, index, "components", region.components,
                       "must be 1 to " + std::to_string(kMaxComponents));
  }
  if (region.heads == 0) return wrong_value(region, index, "heads", 0, "must be positive");
  if (region.total_heads > kMaxHeads) {
    return wrong_value(region, index, "total_heads", region.total_heads,
                       "must be at most " + std::to_string(kMaxHeads));
  }
  if (region.first_head > region.total_heads ||
      region.heads > region.total_heads - region.first_head) {
    return wrong_value(region, index, "heads", region.heads,
                       "with first_head " + std::to_string(region.first_head) +
                           " beyond total_heads " + std::to_string(region.total_heads));
  }
  if (region.replicated && region.heads != region.total_heads) {
    return wrong_value(region, index, "heads", region.heads,
                       "but a replicated region holds all " + std::to_string(region.total_heads));
  }
  if (region.element_bytes == 0) {
    return wrong_value(region, index, "element_bytes", 0, "must be positive");
  }
  return Status::ok();
}

}  // namespace

Status validate_region(const Region& region, std::size_t index) {
  if (region.layer.empty()) return wrong(region, index, "layer is empty, must be the layer's name");
  if (region.dtype.empty()) return wrong(region, index, "dtype is empty, must be the element type");
  if (region.num_blocks == 0 || region.num_blocks == kNoBlock) {
    return wrong_value(region, index, "num_blocks", region.num_blocks,
                       "must be 1 to " + std::to_string(kNoBlock - 1));
  }
  if (region.kind == RegionKind::kState) return check_state(region, index);
  if (region.kind != RegionKind::kAttention) {
    return wrong_value(region, index, "kind", static_cast<std::uint64_t>(region.kind),
                       "must be 0 (attention) or 1 (state)");
  }
  if (Status status = check_tokens(region, index); !status.is_ok()) return status;
  if (Status status = check_heads(region, index); !status.is_ok()) return status;
  std::array axes{
      Axis{"num_blocks", "block_stride", region.num_blocks, region.block_stride},
      Axis{"pages", "page_stride", region.tokens_per_block / region.tokens_per_page,
           region.page_stride},
      Axis{"tokens_per_page", "token_stride", region.tokens_per_page, region.token_stride},
      Axis{"components", "component_stride", region.components, region.component_stride},
      Axis{"heads", "head_stride", region.heads, region.head_stride},
  };
  return check_layout(region, index, axes, "element_bytes", region.element_bytes);
}

}  // namespace kvpush
