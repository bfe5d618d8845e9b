// "Has the accelerator finished this step?" asked from the native thread, without CUDA at build
// time. On CPU a step's KV is in memory when the step ends, so the fence is always open.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "status.h"

namespace kvpush {

// An event recorded on the accelerator's stream by the framework (torch's Event.cuda_event);
// 0: nothing to wait for. The event must stay alive until it was seen complete.
using DeviceEvent = std::uint64_t;

class DeviceFence {
 public:
  virtual ~DeviceFence() = default;
  // Never blocks. True once everything before the event has finished.
  virtual Result<bool> is_complete(DeviceEvent event) = 0;
};

// For memory that the CPU itself writes: every event is complete.
std::unique_ptr<DeviceFence> make_host_fence();

// Asks the CUDA driver, opened here by path or name. The process must have initialised CUDA before
// the first event is asked about; no context need be current on the asking thread. The error says
// which library or symbol is missing.
Result<std::unique_ptr<DeviceFence>> make_cuda_fence(const std::string& driver = "libcuda.so.1");

}  // namespace kvpush
