#include "engine/cuda/driver.h"

#include <dlfcn.h>

#include <memory>

namespace actckpt::cuda {
namespace {

constexpr int kAbiVersion = 12000;
constexpr std::uint64_t kLegacyStream = 1;

using GetProcAddress = Result (*)(const char* symbol, void** function, int version, std::uint64_t flags, int* status);

class Symbols {
 public:
  explicit Symbols(void* library)
      : library_(library), get_(reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"))) {}

  // `name` as in cuGetProcAddress; `exported` is the library's own, versioned name.
  template <typename Function>
  void required(Function* function, const char* name, const char* exported) {
    optional(function, name, exported);
    if (*function == nullptr && missing_.empty()) {
      missing_ = exported;
    }
  }

  template <typename Function>
  void optional(Function* function, const char* name, const char* exported) {
    void* found = nullptr;
    int status = 0;
    if (get_ == nullptr || get_(name, &found, kAbiVersion, kLegacyStream, &status) != kSuccess) {
      found = nullptr;
    }
    if (found == nullptr) {
      found = dlsym(library_, exported);
    }
    *function = reinterpret_cast<Function>(found);
  }

  const std::string& missing() const { return missing_; }

 private:
  void* const library_;
  const GetProcAddress get_;
  std::string missing_;
};

void load_all(Symbols* s, Driver* d) {
  s->required(&d->init, "cuInit", "cuInit");
  s->required(&d->device_get, "cuDeviceGet", "cuDeviceGet");
  s->required(&d->primary_ctx_retain, "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain");
  s->required(&d->ctx_push, "cuCtxPushCurrent", "cuCtxPushCurrent_v2");
  s->required(&d->ctx_pop, "cuCtxPopCurrent", "cuCtxPopCurrent_v2");
  s->required(&d->stream_create, "cuStreamCreate", "cuStreamCreate");
  s->required(&d->stream_wait_event, "cuStreamWaitEvent", "cuStreamWaitEvent");
  s->required(&d->stream_is_capturing, "cuStreamIsCapturing", "cuStreamIsCapturing");
  s->required(&d->exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode");
  s->required(&d->event_create, "cuEventCreate", "cuEventCreate");
  s->required(&d->event_record, "cuEventRecord", "cuEventRecord");
  s->required(&d->event_query, "cuEventQuery", "cuEventQuery");
  s->required(&d->copy_to_host, "cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2");
  s->required(&d->copy_to_device, "cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2");
  s->required(&d->host_register, "cuMemHostRegister", "cuMemHostRegister_v2");
  s->required(&d->host_unregister, "cuMemHostUnregister", "cuMemHostUnregister");
  s->optional(&d->event_elapsed, "cuEventElapsedTime", "cuEventElapsedTime");
  s->optional(&d->error_name, "cuGetErrorName", "cuGetErrorName");
  s->optional(&d->device_attribute, "cuDeviceGetAttribute", "cuDeviceGetAttribute");
}

}  // namespace

OpenedDriver open_driver(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);  // the one that torch uses, if it is loaded
  if (library == nullptr) {
    library = dlopen(name, RTLD_NOW);
  }
  if (library == nullptr) {
    const char* const reason = dlerror();
    return {nullptr, std::string("no driver ") + name + (reason == nullptr ? "" : std::string(": ") + reason)};
  }
  auto driver = std::make_unique<Driver>();
  Symbols symbols(library);
  load_all(&symbols, driver.get());
  if (!symbols.missing().empty()) {
    return {nullptr, std::string("the driver ") + name + " lacks " + symbols.missing() +
                         "; update it (NVIDIA's from 12.0 on is known to work)"};
  }
  return {driver.release(), ""};  // constant and never freed, like the library
}

}  // namespace actckpt::cuda
