// The event protocol's backend for tensors in host memory: copies end before the call returns.
//
// Contract: as Backend. There are no streams, so every event has passed and no wait waits. With a pool of no bytes,
// each tensor is copied into bounce buffers while it is put, and workers move those to the tier below. So a source is
// released at once.
// Thread rule, ownership: as Backend.

#pragma once

#include <cstring>
#include <memory>

#include "engine/protocol/backend.h"

namespace actckpt {

class HostBackend final : public Backend {
 public:
  void enter(int) override {}
  void leave(int) noexcept override {}
  Stream side(int device, Side) override { return {device, 0}; }
  bool capturing(Stream) override { return false; }
  EventPtr record(Stream) override { return passed_; }
  void wait(Stream, const EventPtr&) override {}
  bool passed(const EventPtr&) override { return true; }
  bool is_synchronous() const override { return true; }
  void copy_out(Stream, const Segment& host, std::uintptr_t src) override {
    std::memcpy(host.ptr, reinterpret_cast<const void*>(src), host.bytes);
  }
  void copy_in(Stream, std::uintptr_t dst, const Segment& host) override {
    std::memcpy(reinterpret_cast<void*>(dst), host.ptr, host.bytes);
  }

 private:
  const EventPtr passed_ = std::make_shared<Event>();
};

}  // namespace actckpt
