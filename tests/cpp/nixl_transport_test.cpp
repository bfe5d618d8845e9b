#include "nixl_transport.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "built_library.h"
#include "nixl_metadata.h"
#include "transport_contract.h"

namespace kvpush {
namespace {

const char* library_path() {
  return std::getenv("KVPUSH_NIXL_LIBRARY");
}

std::string backend_name() {
  const char* const name = std::getenv("KVPUSH_NIXL_BACKEND");
  return name == nullptr ? "UCX" : name;
}

std::string why_skip() {
  return library_path() != nullptr ? ""
                                   : "KVPUSH_NIXL_LIBRARY does not name libnixl_capi.so, so there "
                                     "is no NIXL to test with";
}

std::unique_ptr<NixlTransport> make_transport(const std::string& role) {
  static std::atomic<int> made{0};
  Result<std::shared_ptr<const NixlLibrary>> library = NixlLibrary::open(library_path());
  EXPECT_TRUE(library.is_ok()) << library.message();
  NixlTransportOptions options;
  options.agent_name = role + "-" + std::to_string(made++);
  options.backend = backend_name();
  Result<std::unique_ptr<NixlTransport>> transport =
      NixlTransport::create(library.value(), options);
  EXPECT_TRUE(transport.is_ok()) << transport.message();
  return std::move(transport.value());
}

// True once `what` holds; false after a limit that only a hang reaches.
bool happens(const std::function<bool()>& what) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!what()) {
    if (std::chrono::steady_clock::now() > limit) return false;
  }
  return true;
}

struct NixlPair {
  static std::string skip_reason() { return why_skip(); }
  Transport& first() { return *a; }
  Transport& second() { return *b; }
  void progress() {}

  std::unique_ptr<NixlTransport> a = make_transport("a");
  std::unique_ptr<NixlTransport> b = make_transport("b");
};

INSTANTIATE_TYPED_TEST_SUITE_P(Nixl, TransportContract, NixlPair);

// ---- the library -----------------------------------------------------------------------------

TEST(NixlLibrary, NeedsAnAbsolutePath) {
  for (const char* const path : {"", "libnixl_capi.so", "./libnixl_capi.so"}) {
    const auto library = NixlLibrary::open(path);
    EXPECT_FALSE(library.is_ok());
    EXPECT_NE(library.message().find("absolute path"), std::string::npos) << library.message();
  }
}

TEST(NixlLibrary, MissingFileIsNamedWithTheLoadersReason) {
  const std::string path = LibraryBuilder().path("libnixl_capi.so");
  const auto library = NixlLibrary::open(path);
  EXPECT_NE(library.message().find(path), std::string::npos) << library.message();
  EXPECT_NE(library.message().find("No such file"), std::string::npos) << library.message();
}

TEST(NixlLibrary, MissingSymbolIsNamed) {
  const LibraryBuilder builder;
  const std::string path =
      builder.build("old",
                    "extern \"C\" bool nixl_capi_is_stub() { return false; }\n"
                    "extern \"C\" int nixl_capi_create_configured_agent() { return 0; }\n");
  const auto library = NixlLibrary::open(path);
  EXPECT_NE(library.message().find(path), std::string::npos) << library.message();
  EXPECT_NE(library.message().find("nixl_capi_destroy_agent"), std::string::npos)
      << library.message();
}

TEST(NixlLibrary, StubIsRefused) {
  const LibraryBuilder builder;
  const auto library = NixlLibrary::open(
      builder.build("stub", "extern \"C\" bool nixl_capi_is_stub() { return true; }\n"));
  EXPECT_NE(library.message().find("stub"), std::string::npos) << library.message();
  EXPECT_NE(library.message().find("pip install nixl"), std::string::npos) << library.message();
}

// ---- what only NIXL has ------------------------------------------------------------------------

class NixlTransportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_skip(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_F(NixlTransportTest, UnknownBackendIsNamed) {
  const auto library = NixlLibrary::open(library_path());
  ASSERT_TRUE(library.is_ok()) << library.message();
  NixlTransportOptions options;
  options.agent_name = "agent";
  options.backend = "NOSUCH";
  const auto transport = NixlTransport::create(library.value(), options);
  EXPECT_NE(transport.message().find("NOSUCH"), std::string::npos) << transport.message();
}

TEST_F(NixlTransportTest, UnusableNamesAreRefused) {
  const auto library = NixlLibrary::open(library_path());
  ASSERT_TRUE(library.is_ok()) << library.message();
  for (const std::string& name :
       {std::string(), std::string("a\0b", 3), std::string(kMaxNixlNameBytes + 1, 'n')}) {
    NixlTransportOptions options;
    options.agent_name = name;
    EXPECT_FALSE(NixlTransport::create(library.value(), options).is_ok());
  }
}

TEST_F(NixlTransportTest, AnotherBackendsMetadataIsRefusedNamingBoth) {
  const auto transport = make_transport("a");
  const Status status =
      transport->add_peer(wrap_nixl_metadata({"peer", "OTHER", to_bytes("blob")})).status();
  EXPECT_NE(status.message().find("OTHER"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(backend_name()), std::string::npos) << status.message();
}

// A right envelope around bytes that NIXL cannot load.
TEST_F(NixlTransportTest, MetadataThatNixlRefusesLeavesNothingBehind) {
  const auto a = make_transport("a");
  const auto b = make_transport("b");
  const Bytes good = b->local_metadata().value();
  const NixlMetadata inner = unwrap_nixl_metadata(good).value();
  for (const std::size_t size : {std::size_t{0}, std::size_t{11}, inner.blob.size() / 2}) {
    const NixlMetadata cut{b->local_name(), backend_name(), inner.blob.first(size)};
    EXPECT_FALSE(a->add_peer(wrap_nixl_metadata(cut)).is_ok());
  }
  const NixlMetadata renamed{"somebody else", backend_name(), inner.blob};
  EXPECT_FALSE(a->add_peer(wrap_nixl_metadata(renamed)).is_ok());
  EXPECT_EQ(a->counts().peers, 0U);
  EXPECT_FALSE(a->last_error().empty());
  EXPECT_TRUE(a->add_peer(good).is_ok());
}

TEST_F(NixlTransportTest, ARunMayCrossNeighbouringHostRanges) {
  const auto a = make_transport("a");
  const auto b = make_transport("b");
  Bytes source = pattern(300'000, 1);
  Bytes target(300'000);
  const auto at = [](const Bytes& bytes) { return reinterpret_cast<std::uint64_t>(bytes.data()); };
  // Out of order, touching, overlapping, and one twice.
  const auto ranges = [](std::uint64_t base) {
    return std::vector<MemoryRange>{{base + 200'000, 100'000, MemoryKind::kHost, 0},
                                    {base, 100'000, MemoryKind::kHost, 0},
                                    {base + 90'000, 110'000, MemoryKind::kHost, 0},
                                    {base, 100'000, MemoryKind::kHost, 0}};
  };
  ASSERT_TRUE(a->register_memory(ranges(at(source))).is_ok());
  ASSERT_TRUE(b->register_memory(ranges(at(target))).is_ok());
  ASSERT_TRUE(a->register_memory(ranges(at(source))).is_ok()) << "known ranges are no error";
  ASSERT_TRUE(a->add_peer(b->local_metadata().value()).is_ok());
  const CopyRun run{at(source), at(target), 300'000};
  CopyBatch batch;
  batch.runs = {&run, 1};
  const auto handle = a->post(CopyDirection::kWrite, b->local_name(), batch, to_bytes("x"));
  ASSERT_TRUE(handle.is_ok()) << handle.message();
  std::vector<Notification> inbox;
  // Both must be polled: the notification leaves only while its sender polls.
  ASSERT_TRUE(happens([&] {
    const bool ended = a->poll(handle.value()) != HandleState::kInProgress;
    return b->poll_notifications(inbox).is_ok() && ended && !inbox.empty();
  }));
  EXPECT_TRUE(source == target);
  a->release(handle.value());
}

TEST_F(NixlTransportTest, PartlyRegisteredRangeIsRefusedNamingBoth) {
  const auto a = make_transport("a");
  const Bytes memory(100'000);
  const auto base = reinterpret_cast<std::uint64_t>(memory.data());
  const MemoryRange first{base, 50'000, MemoryKind::kHost, 0};
  const MemoryRange second{base + 40'000, 50'000, MemoryKind::kHost, 0};
  ASSERT_TRUE(a->register_memory({&first, 1}).is_ok());
  const Status status = a->register_memory({&second, 1});
  EXPECT_NE(status.message().find("overlaps"), std::string::npos) << status.message();
}

using NixlTransportDeathTest = NixlTransportTest;

TEST_F(NixlTransportDeathTest, UnknownHandlesAreOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto a = make_transport("a");
  EXPECT_DEATH(a->release(7), "handle that does not exist");
  EXPECT_DEATH((void)a->poll(7), "handle that does not exist");
}

}  // namespace
}  // namespace kvpush
