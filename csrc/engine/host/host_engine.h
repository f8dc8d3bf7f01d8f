// Offloads CPU tensors: worker threads copy them to a store while the caller computes.
//
// Contract:
//  - A source is kept until the store has its bytes; after a failed write it stays. Nothing is lost, and a running copy
//    never loses its memory: see NOTE [Ticket states].
//  - In-flight sources never exceed the window (window.h), or one tensor if that is larger.
//  - A thread that must wait runs queued copies instead of idling.
//  - A source that is still held is returned directly, not read from the store.
//  - In a forked child every call raises ForkedError and drops do nothing (NOTE [Fork]). After shutdown calls raise
//    OffloadError; drops still work.
// Thread rule: every call from any thread. Only make_room, wait, load_here, flush and shutdown block; no other call
// waits for a copy. The mutex is a leaf: never held while a copy runs, a reference is dropped, a store's handle is
// destroyed or foreign code is called. Workers never touch Python: once they have released something, they call
// `tell_released`, whose caller collects it.
// Ownership: shares its stores; tickets must be dropped (or shut down) before stores are destroyed, which the shared
// pointers ensure. KeepAlives are returned through Released lists.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/byte_store.h"
#include "engine/fork_guard.h"
#include "engine/host/ticket.h"
#include "engine/keep_alive.h"
#include "engine/window.h"

namespace actckpt {

struct HostConfig {
  int num_workers = 2;                                    // 0: callers run every copy
  std::uint64_t window_bytes = std::uint64_t{256} << 20;  // or kFollowsSizes
  // Workers call it when there is something to `collect`; returns false if nobody was notified. Null: no notification.
  bool (*tell_released)() = nullptr;
};

struct HostStats {
  std::uint64_t num_puts = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t loaded_bytes = 0;
  std::uint64_t stored_bytes = 0;  // of live tickets in stores
  std::uint64_t peak_stored_bytes = 0;
  std::uint64_t inflight_bytes = 0;  // sources whose write has not ended
  std::uint64_t peak_inflight_bytes = 0;
  std::uint64_t graveyard_bytes = 0;  // held only because a copy is still running
  std::uint64_t num_live = 0;         // tickets not dropped
  std::uint64_t window_bytes = 0;     // current maximum of in-flight bytes
  std::uint64_t num_queued = 0;       // copies that no thread has started
  std::uint64_t num_revived = 0;      // gets answered with the source
  std::uint64_t num_prefetched = 0;   // gets whose load had ended
  std::uint64_t num_late = 0;         // gets that had to wait or load themselves
  std::uint64_t num_failed_writes = 0;
  std::uint64_t num_full_writes = 0;   // of these: limit or disk was full
  std::uint64_t num_gone_sources = 0;  // of these: the source's memory was freed
  std::uint64_t num_kept_busy = 0;     // puts that must not wait for the window
  std::uint64_t kept_bytes = 0;        // sources held because their write failed
  double stall_seconds = 0.0;          // callers' time in make_room and wait
  int num_workers = 0;                 // threads that the system granted
  std::string last_error;              // of the store, or of thread creation
};

// Result of a get. Busy: call `wait`, then look again.
enum class Found { kSource, kDestination, kBusy, kNothing };

struct Lookup {
  Found found;
  KeepAlive keep;  // borrowed; valid until the ticket's next call
};

class HostEngine {
 public:
  // A shared pointer that leaks the engine in a forked child, where destroying it would hang.
  static std::shared_ptr<HostEngine> make(const HostConfig& config);
  ~HostEngine() noexcept;
  HostEngine(const HostEngine&) = delete;
  HostEngine& operator=(const HostEngine&) = delete;

  // Takes `source`, which keeps src[:bytes] alive and unchanged, and queues the write. Returns null
  // and takes nothing when the window is full: then `make_room(bytes)` and try again.
  TicketPtr try_put(const std::byte* src, std::size_t bytes, std::shared_ptr<ByteStore> store, KeepAlive source,
                    Released* released);
  // Returns the seconds it took; they count as stall.
  void make_room(std::size_t bytes);
  void count_kept_busy();

  // A number that changes with every failed write; no lock.
  std::uint64_t num_failed_writes() const { return num_failed_writes_; }

  // Never waits. Throws the error of a failed load (once: the next load tries again).
  Lookup look(const TicketPtr& ticket, Released* released);

  // Starts reading into `dst`, which `keep` keeps alive. False, and `keep` is not taken, if there is no need: the
  // source is still held (and now stays), or a load exists already.
  bool start_load(const TicketPtr& ticket, std::byte* dst, KeepAlive keep, Released* released);

  // Waits until the ticket's load has ended; runs it in this thread if no worker has started it.
  void wait(const TicketPtr& ticket);

  // The same as start_load and wait, but no worker is woken.
  bool load_here(const TicketPtr& ticket, std::byte* dst, KeepAlive keep, Released* released);

  // Releases destination and revived source; the ticket can be loaded again.
  void unload(const TicketPtr& ticket, Released* released);

  // Ends the ticket. Idempotent.
  void drop(const TicketPtr& ticket, Released* released) noexcept;

  // References whose copies have ended since the last call.
  void collect(Released* released);

  // Waits until no write is queued or running; helps.
  void flush();

  // Cancels what no thread has started, joins the workers. Idempotent.
  void shutdown() noexcept;

  // Limits the bytes waiting to be written from now on; kFollowsSizes: the window of the settings.
  void limit_window(std::uint64_t bytes);

  HostStats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  explicit HostEngine(const HostConfig& config);
  void check_usable(const char* what) const;
  void work();
  void tell_released(Lock& lock);
  bool fits(std::size_t bytes) const;
  TicketPtr claim_write();
  std::pair<TicketPtr, LoadPtr> claim_load();
  // Result of a write; without `stored` it failed.
  struct Write {
    std::unique_ptr<StoredBytes> stored;
    std::string error;
    bool is_full = false;
    bool is_gone = false;
  };
  static Write written(const Ticket& ticket);
  void note_kept(Ticket* ticket, const Write& failed);
  void run_write(Lock& lock, const TicketPtr& ticket);
  void run_load(Lock& lock, const TicketPtr& ticket, const LoadPtr& load);
  void release(KeepAlive* keep);
  LoadPtr add_load(const TicketPtr& ticket, std::byte* dst, KeepAlive keep);
  void abandon_load(const TicketPtr& ticket);
  std::unique_ptr<StoredBytes> take_stored(Ticket* ticket);
  void hand_over(Released* released);

  const HostConfig config_;
  const ForkGuard fork_guard_;
  mutable std::mutex mutex_;  // leaf; guards all below
  std::condition_variable work_;
  std::condition_variable done_;
  bool closed_ = false;
  int num_idle_ = 0;
  int num_waiting_ = 0;
  int num_pending_ = 0;                              // writes queued or running
  Writes writes_;                                    // not started
  Loads loads_;                                      // not started by a worker, nor requested
  std::atomic<std::uint64_t> num_failed_writes_{0};  // as in stats_
  Released released_;
  bool is_notified_ = false;                        // someone will collect `released_`
  std::vector<std::shared_ptr<ByteStore>> stores_;  // every store ever used stays
  HostStats stats_;
  Window window_;
  std::vector<std::thread> workers_;
};

}  // namespace actckpt
