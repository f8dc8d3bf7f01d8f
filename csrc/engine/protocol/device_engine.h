// The event protocol: device tensors to host slots and back, in stream order, without host waits.
//
// Contract: put, get, load, drop are lines 1-15 of the protocol in docs/engine_protocol; comments
// cite them. D, H and U are the device's write-out, load and urgent-load streams, S the stream that
// is current in the calling thread. No call waits for the device.
//  - The caller allocates destinations and does what only the framework can: for each Release it
//    calls record_stream(use) on the object for every use and then drops it; for a Got with
//    `record_stream`, it calls record_stream(S) on the object before using it.
//  - Sources in flight on a device exceed `window_bytes` by at most one tensor.
//  - After a failed device call nothing is recycled any more: put keeps, get of what is not on the
//    device raises, and what may be in use stays allocated (line 15).
// Thread rule: any thread; calls are serialised. `drop` never waits and makes no device call; it
// may run in the garbage collector. No lock is held while references are dropped: the caller does
// that.
// Ownership: KeepAlives come back in Releases, exactly once, but for those line 15 strands.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/fork_guard.h"
#include "engine/keep_alive.h"
#include "engine/protocol/backend.h"
#include "engine/protocol/rules.h"
#include "engine/protocol/slots.h"

namespace actckpt {

using Uses = std::vector<Stream>;

struct Release {
  KeepAlive keep;
  Uses uses;
};
using Releases = std::vector<Release>;

// A source whose write-out may still run.
struct Flight {
  KeepAlive keep;  // null once released
  std::uint64_t bytes;
  EventPtr d2h;
  Uses uses;
};

// A destination.
struct Landing {
  KeepAlive keep;
  EventPtr h2d;
  Uses waited;  // streams that wait for h2d
};

struct DeviceTicket {
  int device = 0;
  std::uint64_t bytes = 0;
  Stream put_stream{0, 0};
  Block slot;
  EventPtr last[kNumSides];  // the slot's last event on each side stream
  std::shared_ptr<Flight> flight;
  std::unique_ptr<Landing> landing;
  bool dropped = false;
};
using DeviceTicketPtr = std::shared_ptr<DeviceTicket>;

// kKeptStranded: a device call of this put failed; the engine holds `keep` for good, since the copy
// may be running, and the caller keeps the tensor as well. kKeptFailed: an earlier call failed.
enum class PutOutcome { kTaken, kKeptCapturing, kKeptFull, kKeptFailed, kKeptStranded };

struct Put {
  PutOutcome outcome;
  DeviceTicketPtr ticket;  // null unless kTaken
};

enum class GotKind { kSource, kDestination, kNeedsLoad };

struct Got {
  GotKind kind;
  KeepAlive keep;      // borrowed until the ticket's next call; null for kNeedsLoad
  bool record_stream;  // on `keep`, for the stream of the get
};

struct DeviceConfig {
  std::uint64_t window_bytes = std::uint64_t{256} << 20;
  ProtocolRules rules;
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
  std::uint64_t num_revived = 0;
  std::uint64_t num_early_releases = 0;
  std::uint64_t num_kept_full = 0;
  std::uint64_t num_kept_capturing = 0;
  std::uint64_t num_kept_failed = 0;
  std::string last_error;
};

class DeviceEngine {
 public:
  DeviceEngine(std::shared_ptr<Backend> backend, std::shared_ptr<Pool> pool,
               const DeviceConfig& config);

  // Copies bytes at `src` to a slot. Takes `keep` only if the outcome is kTaken or
  // kKeptStranded.
  Put put(std::uintptr_t src, std::uint64_t bytes, Stream stream, KeepAlive keep,
          Releases* releases);

  // Another stream of the program uses the ticket's source (line 2).
  void use(const DeviceTicketPtr& ticket, Stream stream);

  // Lines 7-10. kNeedsLoad: allocate on `stream`, `load` with urgent = true, get again.
  Got get(const DeviceTicketPtr& ticket, Stream stream, Releases* releases);

  // Line 11. `dst` was allocated on stream `allocated_on`. False, and `keep` is not taken, if
  // source or destination is there already.
  bool load(const DeviceTicketPtr& ticket, Stream allocated_on, std::uintptr_t dst, KeepAlive keep,
            Side side, Releases* releases);

  // Line 14: lets go of the destination; the slot stays.
  void unload(const DeviceTicketPtr& ticket, Releases* releases);

  // Lines 12, 13. Idempotent.
  void drop(const DeviceTicketPtr& ticket, Releases* releases) noexcept;

  // Releases what has passed.
  void poll(Releases* releases);

  DeviceStats stats();

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Grave {
    KeepAlive keep;
    std::uint64_t bytes;
    EventPtr last;
  };
  struct Fly {
    std::deque<std::shared_ptr<Flight>> flights;
    std::uint64_t bytes = 0;
  };

  void settle(Releases* releases);
  void bury_dropped(Releases* releases);
  void bury(DeviceTicket* ticket, Releases* releases);
  void bury_landing(DeviceTicket* ticket, Releases* releases);
  void release(Flight* flight, Releases* releases);
  void write_out(DeviceTicket* ticket, std::uintptr_t src, Stream stream, const Fences& fences);
  void shrink_window(int device, Stream stream, Releases* releases);
  bool captures(Stream stream, const char* what);
  void fail(const char* what, const std::exception& error);

  const std::shared_ptr<Backend> backend_;
  const DeviceConfig config_;
  const ForkGuard fork_guard_;

  std::mutex calls_;  // serialises the protocol; held across device calls, never across Python
  Slots slots_;
  std::map<int, Fly> fly_;
  std::list<Grave> graveyard_;
  std::vector<Grave> stranded_;
  std::vector<Block> stranded_slots_;
  bool failed_ = false;
  DeviceStats stats_;

  std::mutex dropped_mutex_;  // leaf
  std::vector<DeviceTicketPtr> dropped_;
};

}  // namespace actckpt
