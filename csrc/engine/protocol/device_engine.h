// The event protocol: device tensors to host memory and back, in stream order, without host waits.
//
// Contract: put, get, load, drop are the lines of README.md here; comments cite them. D, H and U
// are the device's write-out, load and urgent-load streams, S the stream that is current in the
// calling thread. Pinned memory comes first; where it is full, the tier below it.
// Only four calls wait for the device or a worker: `put` with `must`, if bounce buffers are short, `wait` (both are
// counted), `flush` and `finish`.
//  - The caller allocates destinations and does what only the framework can: for each Release it
//    calls record_stream(use) on the object for every use and then drops it; for a Got with
//    `record_stream`, it calls record_stream(S) on the object before using it.
//  - What is held on a device only because a copy runs (sources, and destinations that nobody reads) exceeds the window
//    (window.h) by at most one tensor.
//  - After a failed device call nothing is reused any more: put keeps, get of what is not on the device raises, and
//    what
//    may be in use stays allocated (line 15).
// Thread rule: any thread; calls are serialised. `drop` never waits and makes no device call; it
// may run in the garbage collector. No lock is held while references are dropped: the caller does
// that. `advance` is for workers: it hands nothing back.
// Ownership: KeepAlives come back in Releases, exactly once, but for those line 15 strands.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/fork_guard.h"
#include "engine/keep_alive.h"
#include "engine/protocol/backend.h"
#include "engine/protocol/rules.h"
#include "engine/protocol/slots.h"
#include "engine/protocol/spills.h"
#include "engine/protocol/stream_waits.h"
#include "engine/timing.h"
#include "engine/window.h"

namespace actckpt {

struct Release {
  KeepAlive keep;
  Uses uses;
};
using Releases = std::vector<Release>;

// A source whose write-out may still run.
struct Flight {
  KeepAlive keep;  // null once released
  std::uint64_t bytes;
  EventPtr ready;  // the source was written
  EventPtr d2h;
  Uses uses;
};

struct DeviceTicket {
  int device = 0;
  std::uint64_t bytes = 0;
  Stream put_stream{0, 0};
  Block slot;
  Pieces pieces;             // below pinned memory; then there is no slot
  bool is_below = false;     // pieces were cut; also after they are gone
  EventPtr last[kNumSides];  // the slot's last event on each side stream
  std::shared_ptr<Flight> flight;
  LandingPtr landing;
  bool dropped = false;
};
using DeviceTicketPtr = std::shared_ptr<DeviceTicket>;

// kKeptFull: nothing has room. kKeptBusy: no bounce buffer is free, and the caller must not wait. kKeptBehind: copies
// lag by a window, likewise. kKeptStranded: a device call of this put failed; the copy may be running. kKeptFailed: an
// earlier call failed.
enum class PutOutcome { kTaken, kKeptCapturing, kKeptFull, kKeptBusy, kKeptBehind, kKeptFailed, kKeptStranded };

struct Put {
  PutOutcome outcome;
  DeviceTicketPtr ticket;   // null unless kTaken
  bool holds_keep = false;  // the engine took `keep`, also where the tensor is kept
};

enum class GotKind { kSource, kDestination, kNeedsLoad, kBusy };

struct Got {
  GotKind kind;
  KeepAlive keep;      // borrowed until the ticket's next call; null for kNeedsLoad and kBusy
  bool record_stream;  // on `keep`, for the stream of the get, where it was allocated on another
};

struct DeviceConfig {
  std::uint64_t window_bytes = std::uint64_t{256} << 20;  // or kFollowsSizes
  ProtocolRules rules;
  SpillSettings spill;
};

// What lies below pinned memory.
struct Below {
  std::shared_ptr<Tier> tier;            // null: nothing
  SlabRegistrar* registrar = nullptr;    // pins bounce buffers; must outlive the engine
  std::function<void()> wake = nullptr;  // a copy is pending: call `advance` until it returns false
  std::function<bool()> help = nullptr;  // runs a copy of a worker in this thread; false: there is none
};

struct DeviceStats {
  std::uint64_t num_puts = 0;
  std::uint64_t offloaded_bytes = 0;
  std::uint64_t reloaded_bytes = 0;
  std::uint64_t inflight_bytes = 0;
  std::uint64_t peak_inflight_bytes = 0;
  std::uint64_t graveyard_bytes = 0;
  std::uint64_t stranded_bytes = 0;  // line 15
  std::uint64_t num_live = 0;
  std::uint64_t window_bytes = 0;  // current maximum of in-flight bytes
  std::uint64_t num_revived = 0;
  std::uint64_t num_early_releases = 0;
  std::uint64_t num_kept_full = 0;
  std::uint64_t num_kept_busy = 0;
  std::uint64_t num_kept_behind = 0;
  std::uint64_t num_kept_capturing = 0;
  std::uint64_t num_kept_failed = 0;
  std::uint64_t num_tier_puts = 0;
  std::uint64_t tier_bytes = 0;  // of live tickets
  std::uint64_t peak_tier_bytes = 0;
  std::uint64_t bounce_bytes = 0;    // pinned for bounce buffers
  std::uint64_t num_prefetched = 0;  // reloads that had started before the get
  std::uint64_t num_late = 0;        // waits of kLateSeconds or more
  double stall_seconds = 0.0;        // of streams and callers
  std::uint64_t num_host_waits = 0;  // of puts with `must`
  double host_wait_seconds = 0.0;    // contained in stall_seconds
  SpillCounts spill;
  std::string last_error;
};

class DeviceEngine {
 public:
  using Lock = std::unique_lock<std::mutex>;
  // How a caller waits: returns soon, whether or not anything changed. Null: helps, else sleeps until a worker has made
  // progress. Tests drive a simulated machine here.
  using Pause = std::function<void(Lock&)>;

  DeviceEngine(std::shared_ptr<Backend> backend, std::shared_ptr<Pool> pool, const DeviceConfig& config,
               Below below = {}, Pause pause = nullptr);

  // Copies the bytes at `src` out; `must`: waits for a bounce buffer, and proceeds even if copies lag. Takes `keep`
  // only if the result says so.
  Put put(std::uintptr_t src, std::uint64_t bytes, Stream stream, KeepAlive keep, bool must, Releases* releases);

  // Another stream of the program uses the ticket's source (line 2). False if it was released already: then the caller
  // treats that stream as for a Release.
  bool use(const DeviceTicketPtr& ticket, Stream stream);

  // Lines 7-10. kNeedsLoad: allocate on `stream`, `load` with urgent = true, get again. kBusy: `wait`, get again.
  // Throws the error of a failed fetch, once: the next load tries again.
  Got get(const DeviceTicketPtr& ticket, Stream stream, Releases* releases);

  // Waits until the ticket's load was issued to its stream, or failed.
  void wait(const DeviceTicketPtr& ticket);

  // Line 11. `dst` was allocated on stream `allocated_on`. False, and `keep` is not taken, if
  // source or destination is there already.
  bool load(const DeviceTicketPtr& ticket, Stream allocated_on, std::uintptr_t dst, KeepAlive keep, Side side,
            Releases* releases);

  // Line 14: releases the destination; the bytes stay where they are.
  void unload(const DeviceTicketPtr& ticket, Releases* releases);

  // Lines 12, 13, 19. Idempotent.
  void drop(const DeviceTicketPtr& ticket, Releases* releases) noexcept;

  // Releases sources and destinations of finished copies.
  void poll(Releases* releases);

  // Waits until no bounce buffer is being written to the tier.
  void flush();

  // Continues what workers have finished; true while any copy is pending. Called by workers.
  bool advance() noexcept;

  // Waits for all copies, so that their memory may be freed, and returns what they held. The last call of all, when no
  // worker is left.
  void finish(Releases* releases) noexcept;

  // No device call from now on; waiters are notified.
  void close() noexcept;

  // Line 6 on its own: `stream` waits for in-flight copies beyond the window.
  void make_room(Stream stream, Releases* releases);

  // Limits in-flight bytes from now on; kFollowsSizes: the window of the settings.
  void limit_window(std::uint64_t bytes);

  DeviceStats stats();

  // A number that changes with every failed write to the tier; no lock.
  std::uint64_t num_failed_writes() const { return spills_.num_failed_drains(); }

 private:
  struct Grave {
    KeepAlive keep;
    std::uint64_t bytes;
    Stream home;
    EventPtr last;
  };
  struct Fly {
    std::deque<std::shared_ptr<Flight>> flights;
    std::list<Grave> graves;
    std::uint64_t flight_bytes = 0;
    std::uint64_t grave_bytes = 0;
    std::uint64_t bytes() const { return flight_bytes + grave_bytes; }
  };

  Put begin_put(Lock& lock, std::uintptr_t src, const DeviceTicketPtr& ticket, KeepAlive keep, bool must,
                Releases* releases);
  PutOutcome put_below(Lock& lock, std::uintptr_t src, DeviceTicket* ticket, bool must);
  bool write_pieces(Lock& lock, std::uintptr_t src, DeviceTicket* ticket, bool must);
  void pause(Lock& lock);
  void wake();
  void wake_for(std::uint64_t bytes);
  void settle(Releases* releases);
  void settle_device(int device, Fly* fly, Releases* releases);
  void bury_dropped(Releases* releases);
  void bury(DeviceTicket* ticket, Releases* releases);
  void bury_landing(DeviceTicket* ticket, Releases* releases);
  void release(Flight* flight, Releases* releases);
  void write_out(DeviceTicket* ticket, std::uintptr_t src, const Fences& fences);
  bool lags(int device, std::uint64_t bytes);
  void launch(const DeviceTicketPtr& ticket);
  void shrink_window(Stream stream, Releases* releases);
  void shrink_graves(Fly* fly, Releases* releases);
  void begin_load(DeviceTicket* ticket, const LandingPtr& landing, std::uintptr_t dst, Side side);
  Got get_landing(DeviceTicket* ticket, Stream stream, Releases* releases);
  std::optional<DeviceScope> entered(int device);
  void check_working(const char* what) const;
  bool captures(Stream stream, const char* what);
  void fail(const char* what, const std::exception& error);

  const std::shared_ptr<Backend> backend_;
  const DeviceConfig config_;
  const Pause pause_;
  const std::function<void()> wake_;
  const std::function<bool()> help_;
  const ForkGuard fork_guard_;

  std::mutex calls_;  // serialises the protocol; held across device calls, never across Python
  std::condition_variable moved_;
  Slots slots_;
  Spills spills_;
  StreamWaits waits_;
  std::map<int, Fly> fly_;
  std::vector<Grave> stranded_;
  std::vector<Block> stranded_slots_;
  std::vector<Pieces> stranded_pieces_;
  bool failed_ = false;
  std::uint64_t unwoken_bytes_ = 0;  // that workers were not woken for
  DeviceStats stats_;
  Window window_;

  std::mutex dropped_mutex_;  // leaf
  std::vector<DeviceTicketPtr> dropped_;
};

}  // namespace actckpt
