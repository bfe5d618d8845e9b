#include "device_fence.h"

#include "dynamic_library.h"

namespace kvpush {
namespace {

class HostFence final : public DeviceFence {
 public:
  Result<bool> is_complete(DeviceEvent) override { return true; }
};

// What is used of the CUDA driver's interface: results are an enumeration, events are pointers.
using CudaResult = int;
constexpr CudaResult kCudaSuccess = 0;
constexpr CudaResult kCudaNotReady = 600;

struct CudaDriver {
  CudaResult (*event_query)(void* event) = nullptr;
  CudaResult (*get_error_name)(CudaResult result, const char** name) = nullptr;
};

class CudaFence final : public DeviceFence {
 public:
  explicit CudaFence(CudaDriver driver) : driver_(driver) {}

  Result<bool> is_complete(DeviceEvent event) override {
    if (event == 0) return true;
    const CudaResult result = driver_.event_query(reinterpret_cast<void*>(event));
    if (result == kCudaSuccess) return true;
    if (result == kCudaNotReady) return false;
    const char* name = nullptr;
    if (driver_.get_error_name(result, &name) != kCudaSuccess || name == nullptr) name = "unknown";
    return Status::error("the CUDA driver cannot tell whether a step has finished: error " +
                         std::to_string(result) + " (" + name + ")");
  }

 private:
  CudaDriver driver_;
};

}  // namespace

std::unique_ptr<DeviceFence> make_host_fence() {
  return std::make_unique<HostFence>();
}

Result<std::unique_ptr<DeviceFence>> make_cuda_fence(const std::string& driver) {
  const Result<DynamicLibrary> library = DynamicLibrary::open(driver);
  if (!library.is_ok()) return library.status();
  CudaDriver functions;
  if (Status status = library.value().resolve("cuEventQuery", functions.event_query);
      !status.is_ok()) {
    return status;
  }
  if (Status status = library.value().resolve("cuGetErrorName", functions.get_error_name);
      !status.is_ok()) {
    return status;
  }
  return std::unique_ptr<DeviceFence>(std::make_unique<CudaFence>(functions));
}

}  // namespace kvpush
