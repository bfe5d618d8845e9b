#include "nixl_metadata.h"

#include <string>

#include <gtest/gtest.h>

namespace kvpush {
namespace {

Bytes blob_of(std::size_t size) {
  Bytes blob(size);
  for (std::size_t i = 0; i < size; ++i)
    blob[i] = static_cast<std::byte>(i * 37 + 11);
  return blob;
}

TEST(NixlMetadata, ComesBackAsItWas) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{70'000}}) {
    const Bytes blob = blob_of(size);
    const Bytes wrapped = wrap_nixl_metadata({"agent 7", "UCX", blob});
    const Result<NixlMetadata> result = unwrap_nixl_metadata(wrapped);
    ASSERT_TRUE(result.is_ok()) << result.message();
    EXPECT_EQ(result.value().agent_name, "agent 7");
    EXPECT_EQ(result.value().backend_name, "UCX");
    EXPECT_EQ(Bytes(result.value().blob.begin(), result.value().blob.end()), blob);
  }
}

TEST(NixlMetadata, EveryChangedBitIsNoticed) {
  const Bytes wrapped = wrap_nixl_metadata({"agent", "UCX", blob_of(300)});
  for (std::size_t bit = 0; bit < wrapped.size() * 8; ++bit) {
    Bytes changed = wrapped;
    changed[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    EXPECT_FALSE(unwrap_nixl_metadata(changed).is_ok()) << "bit " << bit;
  }
}

TEST(NixlMetadata, EveryOtherLengthIsNoticed) {
  const Bytes wrapped = wrap_nixl_metadata({"agent", "UCX", blob_of(300)});
  for (std::size_t size = 0; size < wrapped.size(); ++size) {
    EXPECT_FALSE(unwrap_nixl_metadata(BytesView(wrapped).first(size)).is_ok()) << size;
  }
  Bytes longer = wrapped;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(unwrap_nixl_metadata(longer).is_ok());
}

TEST(NixlMetadata, LongestNameFits) {
  const Bytes blob = blob_of(4);
  EXPECT_TRUE(
      unwrap_nixl_metadata(wrap_nixl_metadata({std::string(kMaxNixlNameBytes, 'n'), "UCX", blob}))
          .is_ok());
}

}  // namespace
}  // namespace kvpush
