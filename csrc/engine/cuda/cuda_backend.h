// The event protocol's backend over the CUDA driver.
//
// Contract: as Backend. Every call names itself and its code when it fails. Side streams are
// non-blocking; events carry no timing, but for those of `record_timed`, and are used again. A stream handle belongs to
// the primary context of its device, which `enter` pushes, since handle 0 is per context (trap 5); inside of a scope of
// the same device it makes no call. Queries and creations run in RELAXED capture mode, which then lasts until the
// outermost scope ends. A legacy stream that reports IMPLICIT counts as capturing.
// After `close` (process exit) every call throws and destructors make no driver call.
// Thread rule: the engine serialises; `passed`, `close` and the destruction of events from any
// thread.
// Ownership: streams, events and retained contexts live until the process ends.

#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/cuda/driver.h"
#include "engine/memory/slab.h"
#include "engine/protocol/backend.h"

namespace actckpt::cuda {

class CudaBackend : public Backend, public SlabRegistrar {
 public:
  // Throws DeviceError if the driver cannot start. `driver` must live until the process ends.
  explicit CudaBackend(const Driver* driver);

  void enter(int device) override;
  void leave(int device) noexcept override;
  Stream side(int device, Side side) override;
  bool capturing(Stream stream) override;
  EventPtr record(Stream stream) override;
  void wait(Stream stream, const EventPtr& event) override;
  bool passed(const EventPtr& event) override;
  EventPtr record_timed(Stream stream) override;
  double seconds_between(const EventPtr& first, const EventPtr& second) override;
  void copy_out(Stream stream, const Segment& host, std::uintptr_t src) override;
  void copy_in(Stream stream, std::uintptr_t dst, const Segment& host) override;

  // Slabs are pinned for all devices, near the device entered first.
  void place(void* ptr, std::size_t bytes) noexcept override;
  bool pin(void* ptr, std::size_t bytes) noexcept override;
  void unpin(void* ptr, std::size_t bytes) noexcept override;

  void close() noexcept override { closed_ = true; }

 private:
  struct EventStore {
    std::mutex mutex;                                               // leaf
    std::map<std::pair<int, bool>, std::vector<EventHandle>> free;  // by device, and if timed
  };
  struct CudaEvent;

  void check(Result code, const char* call) const;
  void relax();
  Context context_of(int device);
  EventHandle take_event(int device, bool is_timed);
  EventPtr record_event(Stream stream, bool is_timed);

  const Driver* const driver_;
  std::atomic<bool> closed_{false};
  std::mutex contexts_mutex_;  // leaf
  std::map<int, Context> contexts_;
  std::atomic<int> first_device_{-1};
  std::map<std::pair<int, Side>, Stream> sides_;
  const std::shared_ptr<EventStore> events_;
};

}  // namespace actckpt::cuda
