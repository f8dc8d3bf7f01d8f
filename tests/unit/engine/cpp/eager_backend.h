// A device that is host memory: copies happen at once, events pass a little later.
//
// Contract: as Backend, for real threads and real bytes. An event passes at its third query, so
// that whoever forgets to ask again hangs. Thread rule: `passed` from any thread.

#pragma once

#include <atomic>
#include <cstring>
#include <memory>

#include "engine/protocol/backend.h"

namespace actckpt {

class EagerBackend : public Backend {
 public:
  void enter(int) override {}
  void leave(int) noexcept override {}
  Stream side(int device, Side side) override { return {device, static_cast<std::uintptr_t>(side) + 100}; }
  bool capturing(Stream) override { return false; }
  EventPtr record(Stream) override { return std::make_shared<EagerEvent>(); }
  void wait(Stream, const EventPtr&) override {}
  bool passed(const EventPtr& event) override { return static_cast<EagerEvent&>(*event).num_queries++ >= 2; }
  void copy_out(Stream, const Segment& host, std::uintptr_t src) override {
    std::memcpy(host.ptr, reinterpret_cast<const void*>(src), host.bytes);
  }
  void copy_in(Stream, std::uintptr_t dst, const Segment& host) override {
    std::memcpy(reinterpret_cast<void*>(dst), host.ptr, host.bytes);
  }

 private:
  struct EagerEvent : Event {
    std::atomic<int> num_queries{0};
  };
};

}  // namespace actckpt
