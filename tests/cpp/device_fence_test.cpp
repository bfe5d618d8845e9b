#include "device_fence.h"

#include <string>

#include <gtest/gtest.h>

#include "built_library.h"

namespace kvpush {
namespace {

// A stand-in for the driver: an "event" is the address of the result to give.
constexpr const char* kFakeDriver = R"(
extern "C" int cuEventQuery(void* event) { return *static_cast<int*>(event); }
extern "C" int cuGetErrorName(int result, const char** name) {
  if (result != 700) return 1;
  *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
  return 0;
}
)";

DeviceEvent event_of(int& result) {
  return reinterpret_cast<DeviceEvent>(&result);
}

TEST(DeviceFence, HostFenceIsAlwaysOpen) {
  const auto fence = make_host_fence();
  EXPECT_TRUE(fence->is_complete(0).value());
  EXPECT_TRUE(fence->is_complete(1234).value());
}

TEST(DeviceFence, CudaFenceFollowsTheEvent) {
  const LibraryBuilder builder;
  auto fence = make_cuda_fence(builder.build("driver", kFakeDriver));
  ASSERT_TRUE(fence.is_ok()) << fence.message();
  int result = 600;
  EXPECT_FALSE(fence.value()->is_complete(event_of(result)).value());
  result = 0;
  EXPECT_TRUE(fence.value()->is_complete(event_of(result)).value());
  EXPECT_TRUE(fence.value()->is_complete(0).value()) << "no event: nothing to wait for";
}

TEST(DeviceFence, CudaErrorsAreNamed) {
  const LibraryBuilder builder;
  auto fence = make_cuda_fence(builder.build("driver", kFakeDriver));
  ASSERT_TRUE(fence.is_ok()) << fence.message();
  int result = 700;
  const Result<bool> known = fence.value()->is_complete(event_of(result));
  EXPECT_FALSE(known.is_ok());
  EXPECT_NE(known.message().find("700 (CUDA_ERROR_ILLEGAL_ADDRESS)"), std::string::npos);
  result = 9999;
  const Result<bool> unknown = fence.value()->is_complete(event_of(result));
  EXPECT_NE(unknown.message().find("9999 (unknown)"), std::string::npos) << unknown.message();
}

TEST(DeviceFence, MissingDriverIsAnErrorWithItsName) {
  const std::string driver = LibraryBuilder().path("libcuda.so.1");
  const auto fence = make_cuda_fence(driver);
  EXPECT_FALSE(fence.is_ok());
  EXPECT_NE(fence.message().find(driver), std::string::npos) << fence.message();
}

TEST(DeviceFence, DriverWithoutTheSymbolIsAnErrorWithItsName) {
  const LibraryBuilder builder;
  const std::string driver =
      builder.build("empty", "extern \"C\" int something_else() { return 0; }\n");
  const auto fence = make_cuda_fence(driver);
  EXPECT_FALSE(fence.is_ok());
  EXPECT_NE(fence.message().find("cuEventQuery"), std::string::npos) << fence.message();
  EXPECT_NE(fence.message().find(driver), std::string::npos) << fence.message();
}

}  // namespace
}  // namespace kvpush
