#include "region.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include <gtest/gtest.h>

namespace kvpush {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

// 8 blocks of 16 tokens, 4 heads of 64 bytes, token-major.
Region attention() {
  Region region;
  region.layer = "model.layers.7";
  region.dtype = "bfloat16";
  region.base = 4096;
  region.num_blocks = 8;
  region.block_stride = 4096;
  region.tokens_per_block = 16;
  region.tokens_per_page = 16;
  region.token_stride = 256;
  region.heads = 4;
  region.total_heads = 4;
  region.head_stride = 64;
  region.element_bytes = 64;
  return region;
}

Region state() {
  Region region;
  region.layer = "model.layers.3.conv";
  region.kind = RegionKind::kState;
  region.dtype = "float32";
  region.num_blocks = 8;
  region.block_stride = 1000;
  region.state_bytes = 900;
  return region;
}

// The message of a region that differs from a good one.
std::string refusal(Region region, const std::function<void(Region&)>& change) {
  EXPECT_TRUE(validate_region(region, 5).is_ok()) << validate_region(region, 5).message();
  change(region);
  return validate_region(region, 5).message();
}

struct Wrong {
  const char* what;
  std::function<void(Region&)> change;
  const char* said;  // part of the message
};

TEST(Region, WrongValuesAreNamedWithTheirFieldAndLayer) {
  const Wrong cases[] = {
      {"no dtype", [](Region& r) { r.dtype.clear(); }, "dtype is empty"},
      {"kind", [](Region& r) { r.kind = static_cast<RegionKind>(9); }, "kind is 9"},
      {"no blocks", [](Region& r) { r.num_blocks = 0; }, "num_blocks is 0"},
      {"hole as id", [](Region& r) { r.num_blocks = kNoBlock; }, "num_blocks is 4294967295"},
      {"no tokens", [](Region& r) { r.tokens_per_block = 0; }, "tokens_per_block is 0"},
      {"many tokens", [](Region& r) { r.tokens_per_block = kMaxTokensPerBlock + 1; },
       "tokens_per_block is 262145"},
      {"no page", [](Region& r) { r.tokens_per_page = 0; }, "tokens_per_page is 0"},
      {"odd page", [](Region& r) { r.tokens_per_page = 5; }, "tokens_per_page is 5"},
      {"no component", [](Region& r) { r.components = 0; }, "components is 0"},
      {"many components", [](Region& r) { r.components = 1'025; }, "components is 1025"},
      {"no heads", [](Region& r) { r.heads = 0; }, "heads is 0"},
      {"heads beyond", [](Region& r) { r.first_head = 1; }, "heads is 4, with first_head 1"},
      {"first head wraps", [](Region& r) { r.first_head = 0xFFFF'FFFFU; }, "heads is 4"},
      {"many heads", [](Region& r) { r.total_heads = kMaxHeads + 1; }, "total_heads is 65537"},
      {"partly replicated",
       [](Region& r) {
         r.replicated = true;
         r.total_heads = 8;
       },
       "a replicated region holds all 8"},
      {"no bytes", [](Region& r) { r.element_bytes = 0; }, "element_bytes is 0"},
      {"heads overlap", [](Region& r) { r.head_stride = 63; },
       "head_stride is 63, less than the 64"},
      {"tokens overlap", [](Region& r) { r.token_stride = 255; }, "token_stride is 255"},
      {"blocks overlap", [](Region& r) { r.block_stride = 4095; }, "block_stride is 4095"},
      {"all at once", [](Region& r) { r.block_stride = 0; }, "block_stride is 0"},
      {"pages overlap",
       [](Region& r) {
         r.tokens_per_page = 8;
         r.page_stride = 2047;
       },
       "page_stride is 2047"},
      {"components overlap",
       [](Region& r) {
         r.components = 2;
         r.component_stride = 4096;
       },
       "is 4096, less than"},
      {"size overflows", [](Region& r) { r.block_stride = kMax / 4; }, "overflows 64 bits"},
      {"end overflows", [](Region& r) { r.base = kMax - 100; }, "base is 18446744073709551515"},
  };
  for (const Wrong& wrong : cases) {
    const std::string message = refusal(attention(), wrong.change);
    EXPECT_NE(message.find(wrong.said), std::string::npos) << wrong.what << ": " << message;
    EXPECT_NE(message.find("region 5 (layer 'model.layers.7')"), std::string::npos) << message;
  }
  EXPECT_NE(refusal(attention(), [](Region& r) { r.layer.clear(); }).find("layer is empty"),
            std::string::npos);
}

TEST(Region, StateHasBytesAndBlocksOnly) {
  EXPECT_NE(refusal(state(), [](Region& r) { r.state_bytes = 0; }).find("state_bytes is 0"),
            std::string::npos);
  EXPECT_NE(refusal(state(), [](Region& r) { r.block_stride = 899; }).find("block_stride is 899"),
            std::string::npos);
}

TEST(Region, StridesOfASingleStepDontMatter) {
  Region region = attention();
  region.num_blocks = 1;
  region.block_stride = 0;
  region.page_stride = 3;
  region.component_stride = 1;
  EXPECT_TRUE(validate_region(region, 0).is_ok()) << validate_region(region, 0).message();
}

TEST(Region, KeysAndValuesMayLieInTwoHalvesOfOneAllocation) {
  Region region = attention();
  region.components = 2;
  region.component_stride = region.block_stride * region.num_blocks;
  EXPECT_TRUE(validate_region(region, 0).is_ok());
  --region.component_stride;
  EXPECT_FALSE(validate_region(region, 0).is_ok());
}

TEST(Region, HeadsMayLieOutsideOfBlocks) {
  Region region = attention();
  region.token_stride = 64;
  region.block_stride = 1024;
  region.head_stride = 8 * 1024;
  EXPECT_TRUE(validate_region(region, 0).is_ok());
}

TEST(Region, ATerabyteIsFine) {
  Region region = attention();
  region.num_blocks = 200'000;
  region.block_stride = std::uint64_t{1} << 30;
  EXPECT_TRUE(validate_region(region, 0).is_ok());
}

}  // namespace
}  // namespace kvpush
