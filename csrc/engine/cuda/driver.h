// The CUDA driver as a table of function pointers, declared here and opened at run time.
//
// Contract: no CUDA header is needed to build and no CUDA library to load the extension. Versions
// are explicit: the plain names of several calls mean older ABIs (trap 6). `open_driver` returns a
// table whose required entries are all set, or says which symbol or library is missing.
// Thread rule: the table is constant once made. Ownership: the library is never closed.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace actckpt::cuda {

using Result = int;
using Device = int;
using Context = void*;
using StreamHandle = void*;
using EventHandle = void*;
using DevicePtr = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorDeinitialized = 4;
inline constexpr Result kErrorNotReady = 600;
inline constexpr Result kErrorCaptureImplicit = 906;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDefault = 0;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr int kCaptureNone = 0;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kAttributeHostNumaId = 134;

struct Driver {
  // Required.
  Result (*init)(unsigned flags) = nullptr;
  Result (*device_get)(Device* device, int ordinal) = nullptr;
  Result (*primary_ctx_retain)(Context* context, Device device) = nullptr;
  Result (*ctx_push)(Context context) = nullptr;
  Result (*ctx_pop)(Context* context) = nullptr;
  Result (*stream_create)(StreamHandle* stream, unsigned flags) = nullptr;
  Result (*stream_wait_event)(StreamHandle stream, EventHandle event, unsigned flags) = nullptr;
  Result (*stream_is_capturing)(StreamHandle stream, int* status) = nullptr;
  Result (*exchange_capture_mode)(int* mode) = nullptr;
  Result (*event_create)(EventHandle* event, unsigned flags) = nullptr;
  Result (*event_record)(EventHandle event, StreamHandle stream) = nullptr;
  Result (*event_query)(EventHandle event) = nullptr;
  Result (*copy_to_host)(void* dst, DevicePtr src, std::size_t bytes, StreamHandle stream) = nullptr;
  Result (*copy_to_device)(DevicePtr dst, const void* src, std::size_t bytes, StreamHandle stream) = nullptr;
  Result (*host_register)(void* ptr, std::size_t bytes, unsigned flags) = nullptr;
  Result (*host_unregister)(void* ptr) = nullptr;
  // Optional: null if the driver lacks them; tested at use.
  Result (*event_elapsed)(float* milliseconds, EventHandle first, EventHandle second) = nullptr;
  Result (*error_name)(Result code, const char** name) = nullptr;
  Result (*device_attribute)(int* value, int attribute, Device device) = nullptr;
};

struct OpenedDriver {
  const Driver* driver;  // null if unusable
  std::string why;       // then: which library or symbol is missing
};

// `library`: the argument of dlopen.
OpenedDriver open_driver(const char* library);

}  // namespace actckpt::cuda
