#include "engine/cuda/cuda_backend.h"

#include <algorithm>
#include <string>
#include <vector>

#include "engine/cuda/numa.h"
#include "engine/errors.h"

namespace actckpt::cuda {
namespace {

// An urgent reload waits behind at most one such piece on each copy engine (trap 18).
constexpr std::size_t kPieceBytes = std::size_t{32} << 20;

StreamHandle native(Stream stream) { return reinterpret_cast<StreamHandle>(stream.handle); }

// A device that this thread has entered, how often, and the capture mode to restore.
struct Entered {
  const CudaBackend* backend;
  int device;
  int depth = 1;
  bool is_relaxed = false;
  int mode = kCaptureModeRelaxed;
};

// Only the engine runs inside a scope, so its current device stays current until the scope ends.
thread_local std::vector<Entered> entered;

}  // namespace

struct CudaBackend::CudaEvent : Event {
  CudaEvent(std::shared_ptr<EventStore> s, EventHandle h, int d, bool t)
      : store(std::move(s)), handle(h), device(d), is_timed(t) {}
  ~CudaEvent() override {  // no driver call: may run in the garbage collector
    const std::lock_guard<std::mutex> lock(store->mutex);
    store->free[{device, is_timed}].push_back(handle);
  }
  const std::shared_ptr<EventStore> store;
  const EventHandle handle;
  const int device;
  const bool is_timed;
};

CudaBackend::CudaBackend(const Driver* driver) : driver_(driver), events_(std::make_shared<EventStore>()) {
  check(driver_->init(0), "cuInit");
}

void CudaBackend::check(Result code, const char* call) const {
  if (code == kSuccess) {
    return;
  }
  const char* name = nullptr;
  if (driver_->error_name != nullptr) {
    driver_->error_name(code, &name);
  }
  throw DeviceError(std::string(call) + " returned " + (name != nullptr ? name : "error") + " (" +
                    std::to_string(code) + ").");
}

Context CudaBackend::context_of(int device) {
  {
    const std::lock_guard<std::mutex> lock(contexts_mutex_);
    const auto found = contexts_.find(device);
    if (found != contexts_.end()) {
      return found->second;
    }
  }
  Device handle = 0;
  Context context = nullptr;
  check(driver_->device_get(&handle, device), "cuDeviceGet");
  check(driver_->primary_ctx_retain(&context, handle), "cuDevicePrimaryCtxRetain");
  const std::lock_guard<std::mutex> lock(contexts_mutex_);
  contexts_.emplace(device, context);
  int none = -1;
  first_device_.compare_exchange_strong(none, device);
  return context;
}

void CudaBackend::enter(int device) {
  if (closed_) {
    throw DeviceError("the process is ending; no device call is made any more.");
  }
  if (!entered.empty() && entered.back().backend == this && entered.back().device == device) {
    ++entered.back().depth;
    return;
  }
  const Context context = context_of(device);
  entered.reserve(entered.size() + 1);
  check(driver_->ctx_push(context), "cuCtxPushCurrent_v2");
  entered.push_back({this, device});
}

void CudaBackend::leave(int) noexcept {
  if (--entered.back().depth > 0) {
    return;
  }
  Entered ended = entered.back();
  entered.pop_back();
  if (closed_) {
    return;
  }
  if (ended.is_relaxed) {
    driver_->exchange_capture_mode(&ended.mode);
  }
  Context previous = nullptr;
  driver_->ctx_pop(&previous);
}

// Allows calls that are illegal during capture, or would break another thread's capture, until the scope ends.
void CudaBackend::relax() {
  Entered& now = entered.back();
  if (!now.is_relaxed) {
    now.is_relaxed = driver_->exchange_capture_mode(&now.mode) == kSuccess;
  }
}

Stream CudaBackend::side(int device, Side side) {
  const auto found = sides_.find({device, side});
  if (found != sides_.end()) {
    return found->second;
  }
  relax();
  StreamHandle handle = nullptr;
  check(driver_->stream_create(&handle, kStreamNonBlocking), "cuStreamCreate");
  const Stream stream{device, reinterpret_cast<std::uintptr_t>(handle)};
  sides_.emplace(std::make_pair(device, side), stream);
  return stream;
}

bool CudaBackend::capturing(Stream stream) {
  int status = kCaptureNone;
  const Result code = driver_->stream_is_capturing(native(stream), &status);
  if (code == kErrorCaptureImplicit) {
    return true;
  }
  check(code, "cuStreamIsCapturing");
  return status != kCaptureNone;
}

EventHandle CudaBackend::take_event(int device, bool is_timed) {
  {
    const std::lock_guard<std::mutex> lock(events_->mutex);
    auto& free = events_->free[{device, is_timed}];
    if (!free.empty()) {
      const EventHandle handle = free.back();
      free.pop_back();
      return handle;
    }
  }
  relax();
  EventHandle handle = nullptr;
  check(driver_->event_create(&handle, is_timed ? kEventDefault : kEventDisableTiming), "cuEventCreate");
  return handle;
}

EventPtr CudaBackend::record_event(Stream stream, bool is_timed) {
  auto event = std::make_shared<CudaEvent>(events_, take_event(stream.device, is_timed), stream.device, is_timed);
  check(driver_->event_record(event->handle, native(stream)), "cuEventRecord");
  return event;
}

EventPtr CudaBackend::record(Stream stream) { return record_event(stream, false); }

EventPtr CudaBackend::record_timed(Stream stream) {
  return driver_->event_elapsed == nullptr ? nullptr : record_event(stream, true);
}

double CudaBackend::seconds_between(const EventPtr& first, const EventPtr& second) {
  const auto& own = static_cast<const CudaEvent&>(*first);
  const DeviceScope scope(this, own.device);
  relax();
  float milliseconds = 0.0F;
  check(driver_->event_elapsed(&milliseconds, own.handle, static_cast<const CudaEvent&>(*second).handle),
        "cuEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

void CudaBackend::wait(Stream stream, const EventPtr& event) {
  check(driver_->stream_wait_event(native(stream), static_cast<CudaEvent&>(*event).handle, 0), "cuStreamWaitEvent");
}

bool CudaBackend::passed(const EventPtr& event) {
  const auto& own = static_cast<const CudaEvent&>(*event);
  const DeviceScope scope(this, own.device);
  relax();
  const Result code = driver_->event_query(own.handle);
  if (code == kErrorNotReady) {
    return false;
  }
  check(code, "cuEventQuery");
  return true;
}

void CudaBackend::copy_out(Stream stream, const Segment& host, std::uintptr_t src) {
  for (std::size_t done = 0; done < host.bytes; done += kPieceBytes) {
    const std::size_t piece = std::min(kPieceBytes, host.bytes - done);
    check(driver_->copy_to_host(host.ptr + done, src + done, piece, native(stream)), "cuMemcpyDtoHAsync_v2");
  }
}

void CudaBackend::copy_in(Stream stream, std::uintptr_t dst, const Segment& host) {
  for (std::size_t done = 0; done < host.bytes; done += kPieceBytes) {
    const std::size_t piece = std::min(kPieceBytes, host.bytes - done);
    check(driver_->copy_to_device(dst + done, host.ptr + done, piece, native(stream)), "cuMemcpyHtoDAsync_v2");
  }
}

void CudaBackend::place(void* ptr, std::size_t bytes) noexcept {
  if (!closed_ && first_device_ >= 0) {
    prefer_node(ptr, bytes, host_node_of(*driver_, first_device_));
    populate(ptr, bytes);
  }
}

bool CudaBackend::pin(void* ptr, std::size_t bytes) noexcept {
  try {
    const DeviceScope scope(this, std::max(0, first_device_.load()));
    relax();
    return driver_->host_register(ptr, bytes, kHostRegisterPortable) == kSuccess;
  } catch (const DeviceError&) {
    return false;
  }
}

void CudaBackend::unpin(void* ptr, std::size_t) noexcept {
  try {
    const DeviceScope scope(this, std::max(0, first_device_.load()));
    relax();
    driver_->host_unregister(ptr);
  } catch (const DeviceError&) {  // the process is ending; the driver releases it
  }
}

}  // namespace actckpt::cuda
