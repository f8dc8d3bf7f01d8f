// The device operations that the event protocol uses: streams, events, copies.
//
// Contract: streams and events have CUDA semantics: a stream runs its work in order; `wait` makes the stream's later
// work wait for what the event captured when it was recorded. No call blocks until device work is done. A call that
// fails throws DeviceError naming the call and its code; the state of the work that it had started is then unknown.
// Destroying an Event makes no device call. Thread rule: the engine serialises its calls. Ownership: events are shared;
// streams live as long as the backend.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/memory/pool.h"

namespace actckpt {

// Handle 0 is each device's default stream, so a stream is a pair (trap 5).
struct Stream {
  int device;
  std::uintptr_t handle;

  friend bool operator==(const Stream& a, const Stream& b) { return a.device == b.device && a.handle == b.handle; }
};

class Event {
 public:
  virtual ~Event() = default;
};
using EventPtr = std::shared_ptr<Event>;

// The engine's own streams of each device.
enum class Side { kOut, kIn, kUrgent };
inline constexpr int kNumSides = 3;

class Backend {
 public:
  virtual ~Backend() = default;

  // Makes the device's context current in this thread until `leave`; scopes nest. All other calls are made inside a
  // scope; `passed` and `seconds_between` also outside.
  virtual void enter(int device) = 0;
  virtual void leave(int device) noexcept = 0;

  virtual Stream side(int device, Side side) = 0;
  virtual bool capturing(Stream stream) = 0;
  virtual EventPtr record(Stream stream) = 0;
  virtual void wait(Stream stream, const EventPtr& event) = 0;
  virtual bool passed(const EventPtr& event) = 0;
  virtual void copy_out(Stream stream, const Segment& host, std::uintptr_t src) = 0;
  virtual void copy_in(Stream stream, std::uintptr_t dst, const Segment& host) = 0;

  // Whether copies have ended when their calls return.
  virtual bool is_synchronous() const { return false; }

  // No call of the device from now on: each throws.
  virtual void close() noexcept {}

  // For statistics only: an event with a time, null if the device has none; and the time between two that have passed.
  virtual EventPtr record_timed(Stream stream) {
    (void)stream;
    return nullptr;
  }
  virtual double seconds_between(const EventPtr& first, const EventPtr& second) {
    (void)first;
    (void)second;
    return 0.0;
  }
};

// The device's context is current while this lives.
class DeviceScope {
 public:
  DeviceScope(Backend* backend, int device) : backend_(backend), device_(device) { backend_->enter(device_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() noexcept { backend_->leave(device_); }

 private:
  Backend* const backend_;
  const int device_;
};

}  // namespace actckpt
