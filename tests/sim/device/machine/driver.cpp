#include "sim/device/machine/driver.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/driver.h"
#include "sim/device/machine/copies.h"
#include "sim/device/machine/memory.h"
#include "sim/device/machine/pinned.h"

// NOTE [ The driver ]: the calls behave as CUDA's where the engine can tell. Contexts are a stack per thread; handle 0
// is the current context's default stream; an event is recorded in the context it was made in; one that was never
// recorded has passed; capture makes calls fail outside of RELAXED mode. What a right engine never does is a fault.

namespace actckpt::sim_device {
namespace {

using cuda::Result;

constexpr Result kOutOfMemory = 2;
constexpr Result kInvalidValue = 1;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kCaptureUnsupported = 900;
constexpr Result kCaptureIsolation = 905;

struct DriverEvent {
  int device;
  bool is_timed;
  bool is_recorded = false;
  Point point;
};

thread_local std::vector<int> contexts;  // devices
thread_local int capture_mode = 0;

std::map<const void*, std::unique_ptr<DriverEvent>>& events() {
  static auto* const all = new std::map<const void*, std::unique_ptr<DriverEvent>>();
  return *all;
}

void* context_of(int device) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(device) + 1); }

Result fault(const std::string& what, Result code) {
  faults().add(what);
  return code;
}

// The start of a call that can fail.
class Call {
 public:
  Call() : lock(lock_machine()) {
    DriverControls& controls = driver_controls();
    failure = ++controls.num_calls >= controls.fails_from ? controls.failure : cuda::kSuccess;
    streams().meddle(lock);
  }
  Lock lock;
  Result failure;
};

// Null, and a fault, where the handle names no stream here.
Stream* stream_at(void* handle, const char* call) {
  if (contexts.empty()) {
    faults().add(std::string(call) + ": no context is current");
    return nullptr;
  }
  Stream* const stream = stream_of(contexts.back(), handle);
  if (stream == nullptr) {
    faults().add(std::string(call) + ": an unknown stream, or one of another device");
  }
  return stream;
}

DriverEvent* event_at(void* handle, const char* call) {
  const auto found = events().find(handle);
  if (found == events().end()) {
    faults().add(std::string(call) + ": an unknown event, or a destroyed one");
    return nullptr;
  }
  return found->second.get();
}

Result copy(void* stream, const Copy& copy) {
  Call call;
  Stream* const on = stream_at(stream, copy.what);
  if (on == nullptr) {
    return kInvalidHandle;
  }
  give_copy(call.lock, on, copy);
  return call.failure;  // a failed call may have begun the copy
}

}  // namespace

DriverControls& driver_controls() {
  static DriverControls controls;
  return controls;
}

void* handle_of(const Stream* stream) { return stream->id == 0 ? nullptr : const_cast<Stream*>(stream); }

Stream* stream_of(int device, const void* handle) {
  if (handle == nullptr) {
    return streams().find(device, 0);
  }
  auto* const stream = static_cast<Stream*>(const_cast<void*>(handle));
  return streams().knows(stream) && stream->device == device && stream->id != 0 ? stream : nullptr;
}

}  // namespace actckpt::sim_device

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

using namespace actckpt::sim_device;  // NOLINT: the functions below have C linkage
namespace cuda = actckpt::cuda;

SIM_EXPORT int cuInit(unsigned) { return Call().failure; }

SIM_EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= kNumDevices) {
    return kInvalidDevice;
  }
  *device = ordinal;
  return Call().failure;
}

SIM_EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context_of(device);
  return Call().failure;
}

SIM_EXPORT int cuCtxPushCurrent_v2(void* context) {
  const Call call;
  if (call.failure == cuda::kSuccess) {
    contexts.push_back(static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1);
  }
  return call.failure;
}

SIM_EXPORT int cuCtxPopCurrent_v2(void** context) {
  const Call call;
  if (contexts.empty()) {
    return fault("cuCtxPopCurrent: no context is current", kInvalidContext);
  }
  *context = context_of(contexts.back());
  contexts.pop_back();
  return call.failure;
}

SIM_EXPORT int cuStreamCreate(void** stream, unsigned flags) {
  const Call call;
  if (call.failure != cuda::kSuccess) {
    return call.failure;
  }
  if (contexts.empty()) {
    return fault("cuStreamCreate: no context is current", kInvalidContext);
  }
  if (flags != cuda::kStreamNonBlocking) {
    faults().add("cuStreamCreate: a stream that the default stream serialises");
  }
  *stream = streams().create(contexts.back());
  return cuda::kSuccess;
}

SIM_EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const Call call;
  if (call.failure != cuda::kSuccess) {
    return call.failure;
  }
  Stream* const on = stream_at(stream, "cuStreamWaitEvent");
  const DriverEvent* const own = event_at(event, "cuStreamWaitEvent");
  if (on == nullptr || own == nullptr) {
    return kInvalidHandle;
  }
  if (on->is_capturing) {
    return kCaptureIsolation;
  }
  streams().wait(call.lock, on, own->point);
  return cuda::kSuccess;
}

SIM_EXPORT int cuStreamIsCapturing(void* stream, int* status) {
  const Call call;
  if (call.failure != cuda::kSuccess) {
    return call.failure;
  }
  const Stream* const on = stream_at(stream, "cuStreamIsCapturing");
  if (on == nullptr) {
    return kInvalidHandle;
  }
  if (stream == nullptr && !on->is_capturing && streams().is_any_capturing()) {
    return cuda::kErrorCaptureImplicit;
  }
  *status = on->is_capturing ? 1 : 0;
  return cuda::kSuccess;
}

SIM_EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  // The mode belongs to the thread: a device that has failed must not keep it from being put back.
  std::swap(*mode, capture_mode);
  return cuda::kSuccess;
}

SIM_EXPORT int cuStreamSynchronize(void* stream) {
  Call call;
  Stream* const on = stream_at(stream, "cuStreamSynchronize");
  if (on == nullptr) {
    return kInvalidHandle;
  }
  streams().synchronize(call.lock, streams().record(call.lock, on));
  return call.failure;
}

SIM_EXPORT int cuEventCreate(void** event, unsigned flags) {
  const Call call;
  if (call.failure != cuda::kSuccess) {
    return call.failure;
  }
  if (contexts.empty()) {
    return fault("cuEventCreate: no context is current", kInvalidContext);
  }
  if (flags != cuda::kEventDisableTiming && flags != cuda::kEventDefault) {
    faults().add("cuEventCreate: flags of no use");
  }
  auto made = std::make_unique<DriverEvent>(DriverEvent{contexts.back(), flags == cuda::kEventDefault, false, {}});
  *event = made.get();
  events().emplace(made.get(), std::move(made));
  return cuda::kSuccess;
}

SIM_EXPORT int cuEventDestroy_v2(void* event) {
  const Call call;
  if (event_at(event, "cuEventDestroy") == nullptr) {
    return kInvalidHandle;
  }
  events().erase(event);
  return call.failure;
}

SIM_EXPORT int cuEventRecord(void* event, void* stream) {
  const Call call;
  if (call.failure != cuda::kSuccess) {
    return call.failure;
  }
  const Stream* const on = stream_at(stream, "cuEventRecord");
  DriverEvent* const own = event_at(event, "cuEventRecord");
  if (on == nullptr || own == nullptr) {
    return kInvalidHandle;
  }
  if (own->device != on->device) {
    return fault("cuEventRecord: an event of another context", kInvalidContext);
  }
  own->point = streams().record(call.lock, const_cast<Stream*>(on));
  own->is_recorded = true;
  return cuda::kSuccess;
}

SIM_EXPORT int cuEventQuery(void* event) {
  Call call;
  if (call.failure != cuda::kSuccess) {
    return call.failure;
  }
  if (streams().is_any_capturing() && capture_mode != cuda::kCaptureModeRelaxed) {
    return kCaptureUnsupported;
  }
  if (contexts.empty()) {
    return fault("cuEventQuery: no context is current", kInvalidContext);
  }
  const DriverEvent* const own = event_at(event, "cuEventQuery");
  if (own == nullptr) {
    return kInvalidHandle;
  }
  return streams().query(call.lock, Point(own->point)) ? cuda::kSuccess : cuda::kErrorNotReady;
}

SIM_EXPORT int cuEventSynchronize(void* event) {
  Call call;
  const DriverEvent* const own = event_at(event, "cuEventSynchronize");
  if (own == nullptr) {
    return kInvalidHandle;
  }
  streams().synchronize(call.lock, Point(own->point));
  return call.failure;
}

SIM_EXPORT int cuEventElapsedTime(float* milliseconds, void* first, void* second) {
  const Call call;
  if (call.failure != cuda::kSuccess) {
    return call.failure;
  }
  const DriverEvent* const begin = event_at(first, "cuEventElapsedTime");
  const DriverEvent* const end = event_at(second, "cuEventElapsedTime");
  if (begin == nullptr || end == nullptr) {
    return kInvalidHandle;
  }
  if (!begin->is_timed || !end->is_timed || !begin->is_recorded || !end->is_recorded) {
    return fault("cuEventElapsedTime: an event without a time", kInvalidHandle);
  }
  if (!streams().has_passed(begin->point) || !streams().has_passed(end->point)) {
    return cuda::kErrorNotReady;
  }
  *milliseconds = static_cast<float>((end->point.time_s - begin->point.time_s) * 1e3);
  return cuda::kSuccess;
}

SIM_EXPORT int cuMemcpyDtoHAsync_v2(void* dst, unsigned long long src, std::size_t bytes, void* stream) {
  return copy(stream, {Direction::kToHost, dst, reinterpret_cast<const void*>(src), bytes, "cuMemcpyDtoHAsync"});
}

SIM_EXPORT int cuMemcpyHtoDAsync_v2(unsigned long long dst, const void* src, std::size_t bytes, void* stream) {
  return copy(stream, {Direction::kToDevice, reinterpret_cast<void*>(dst), src, bytes, "cuMemcpyHtoDAsync"});
}

SIM_EXPORT int cuMemHostRegister_v2(void* ptr, std::size_t bytes, unsigned flags) {
  const Call call;
  if (call.failure != cuda::kSuccess) {
    return call.failure;
  }
  if (driver_controls().refuses_pins) {
    return kOutOfMemory;
  }
  if (flags != cuda::kHostRegisterPortable) {
    faults().add("cuMemHostRegister: memory pinned for one context only");
  }
  if (!pinned_memory().add(call.lock, range_of(ptr, bytes))) {
    return fault("cuMemHostRegister: memory that is pinned already", kInvalidValue);
  }
  return cuda::kSuccess;
}

SIM_EXPORT int cuMemHostUnregister(void* ptr) {
  Call call;
  if (!pinned_memory().remove(call.lock, ptr)) {
    return fault("cuMemHostUnregister: memory that is not registered", kInvalidValue);
  }
  return call.failure;
}

SIM_EXPORT int cuGetErrorName(int code, const char** name) {
  *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_OF_SIM";
  return cuda::kSuccess;
}

SIM_EXPORT int cuDeviceGetAttribute(int* value, int, int) {
  *value = -1;
  return Call().failure;
}
