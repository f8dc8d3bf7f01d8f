// Offloads CPU tensors: worker threads copy them to a store while the caller computes.
//
// Contract:
//  - A put copies its source to a buffer before it returns, so that the program may do with the source what it wants.
//    A buffer is kept until the store has its bytes; a write that fails keeps it as long as the ticket lives. Nothing
//    is lost: see NOTE [Ticket states].
//  - Bytes in buffers never exceed the window (window.h), or one tensor if that is larger, but for failed writes.
//  - A thread that has to wait runs copies that no worker has begun instead of idling.
//  - Bytes that are still in a buffer come back from there instead of the store.
//  - In a forked child every call raises ForkedError and drops do nothing (NOTE [Fork]). After
//    shutdown calls raise ClosedError; drops still work.
// Thread rule: every call from any thread. Only make_room, wait, load_here, flush and shutdown
// block; none of the others waits for a copy but its own. The mutex is a leaf: never held while a copy runs, a
// reference is dropped, a handle of a store destroyed or foreign code called. Workers never touch
// Python: once they have released something, they call `tell_released`, whose caller collects it.
// Ownership: shares its stores; tickets must be dropped (or shut down) before stores go away, which
// the shared pointers see to. KeepAlives come back through Released lists.

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
  // Workers say that there is something to `collect`; false: nobody was told. Null: nobody is.
  bool (*tell_released)() = nullptr;
};

struct HostStats {
  std::uint64_t num_puts = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t loaded_bytes = 0;
  std::uint64_t stored_bytes = 0;  // held by stores for live tickets
  std::uint64_t peak_stored_bytes = 0;
  std::uint64_t inflight_bytes = 0;  // copied, and not yet written
  std::uint64_t peak_inflight_bytes = 0;
  std::uint64_t graveyard_bytes = 0;  // held only because a copy still runs
  std::uint64_t num_live = 0;         // tickets not dropped
  std::uint64_t window_bytes = 0;     // most that may be in flight now
  std::uint64_t num_queued = 0;       // copies that no thread has begun
  std::uint64_t num_revived = 0;      // loads from memory: the store did not have the bytes yet
  std::uint64_t num_prefetched = 0;   // gets whose load had ended
  std::uint64_t num_late = 0;         // gets that had to wait or load themselves
  std::uint64_t num_failed_writes = 0;
  std::uint64_t num_full_writes = 0;  // of these: limit or disk had no room
  std::uint64_t num_kept_busy = 0;    // puts that did not want to wait for the window
  std::uint64_t num_kept_full = 0;    // puts that found no memory to copy to
  std::uint64_t kept_bytes = 0;       // held in memory because their write failed
  double stall_seconds = 0.0;         // callers' time in make_room and wait
  int num_workers = 0;                // threads that the system let us have
  std::string last_error;             // of the store, or of making threads
};

// What a get finds. Busy: call `wait`, then look again.
enum class Found { kDestination, kBusy, kNothing };

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

  // Copies src[:bytes], which the caller keeps as it is meanwhile, and queues the write. Returns null when the window
  // is full: then `make_room(bytes)` and try again. Throws HostPoolFullError where there is no memory to copy to.
  TicketPtr try_put(const std::byte* src, std::size_t bytes, std::shared_ptr<ByteStore> store);
  // The time that it takes counts as stall.
  void make_room(std::size_t bytes);
  void count_kept_busy();
  void count_kept_full();

  // A number that changes with every failed write; no lock.
  std::uint64_t num_failed_writes() const { return num_failed_writes_; }

  // Never waits. Throws what a failed load left (once: the next load tries again).
  Lookup look(const TicketPtr& ticket, Released* released);

  // Starts reading into `dst`, which `keep` keeps alive. False, and `keep` is not taken, if a load exists already.
  bool start_load(const TicketPtr& ticket, std::byte* dst, KeepAlive keep, Released* released);

  // Until the ticket's load has ended; runs it in this thread if no worker has begun.
  void wait(const TicketPtr& ticket);

  // The same as start_load and wait, but no worker is woken.
  bool load_here(const TicketPtr& ticket, std::byte* dst, KeepAlive keep, Released* released);

  // Gives back the destination; the ticket can be loaded again.
  void unload(const TicketPtr& ticket, Released* released);

  // Ends the ticket. Idempotent.
  void drop(const TicketPtr& ticket, Released* released) noexcept;

  // Destinations whose copies have ended since the last call, and that nobody asks for any more.
  void collect(Released* released);

  // Until no write is queued or running; helps.
  void flush();

  // Cancels what no thread has begun, joins the workers. Idempotent.
  void shutdown() noexcept;

  // What is waiting to be written stays below this from now on; kFollowsSizes: the window of the settings.
  void limit_window(std::uint64_t bytes);

  // Unmaps buffers that are free; returns how many bytes.
  std::uint64_t trim();

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
  // What became of a write; without `stored` it has failed.
  struct Write {
    std::unique_ptr<StoredBytes> stored;
    std::string error;
    bool is_full = false;
  };
  static Write written(const Ticket& ticket, const std::byte* src);
  Buffer filled_buffer(const std::byte* src, std::size_t bytes);
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
  const std::shared_ptr<Buffers> buffers_ = std::make_shared<Buffers>();
  mutable std::mutex mutex_;  // leaf; guards all below
  std::condition_variable work_;
  std::condition_variable done_;
  bool closed_ = false;
  int num_idle_ = 0;
  int num_waiting_ = 0;
  int num_pending_ = 0;                              // writes queued or running
  Writes writes_;                                    // not begun
  Loads loads_;                                      // not begun by a worker, nor asked for
  std::atomic<std::uint64_t> num_failed_writes_{0};  // as in stats_
  Released released_;
  bool is_told_ = false;                            // somebody will collect what is in released_
  std::vector<std::shared_ptr<ByteStore>> stores_;  // every store ever used stays
  HostStats stats_;
  Window window_;
  std::vector<std::thread> workers_;
};

}  // namespace actckpt
