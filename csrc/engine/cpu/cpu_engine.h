// Offloads CPU tensors: workers copy them to the spill file while the caller computes.
//
// Contract:
//  - A source is kept until the file has its bytes; after a failed write it stays. A source that is still held is
//    returned directly, not read from the file.
//  - In-flight sources never exceed the window (window.h), or one tensor if that is larger.
//  - A thread that must wait runs queued copies instead of idling. With no threads, callers run every copy.
//  - In a forked child every call raises ForkedError and drops do nothing (NOTE [Fork]). After shutdown calls raise
//    OffloadError; drops still work.
// NOTE [CPU copies]: a job of the workers runs a copy without the lock, and records its end under it. Until a job has
// started, `Workers::take` cancels it, or hands it to a caller that waits. A dropped ticket, or an abandoned load,
// whose job is running is the graveyard: source, destination and stored bytes stay until the job ends. Thread rule:
// every call from any thread. Only make_room, wait, load with `waits`, flush and shutdown block. While the mutex is
// held, no copy runs, no reference is dropped and no foreign code is called; jobs are submitted and taken. Workers
// never touch Python: once they have released something, they call `tell_released`, whose caller collects it.
// Ownership: shares the file. KeepAlives are returned through Released lists.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "engine/disk/spill_file.h"
#include "engine/fork_guard.h"
#include "engine/keep_alive.h"
#include "engine/tiers/workers.h"
#include "engine/window.h"

namespace actckpt {

struct CpuConfig {
  int num_workers = 2;                                    // 0: callers run every copy
  std::uint64_t window_bytes = std::uint64_t{256} << 20;  // or kFollowsSizes
  // Workers call it when `collect` has references to return; false: the call notified no thread. Null: no notification.
  bool (*tell_released)() = nullptr;
};

struct CpuStats {
  std::uint64_t num_puts = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t loaded_bytes = 0;
  std::uint64_t stored_bytes = 0;  // of live tickets in the file
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
  double stall_seconds = 0.0;          // callers' time in make_room, wait and load
  std::string last_error;              // of a write
};

// One destination; a ticket has at most one.
struct CpuLoad {
  CpuLoad(std::byte* dst_, KeepAlive keep_) : dst(dst_), keep(keep_) {}

  std::byte* const dst;
  KeepAlive keep;
  Workers::JobId job = 0;
  bool has_ended = false;
  bool is_counted = false;   // in time or late
  std::exception_ptr error;  // of a load that failed
};

// Guarded by the engine's mutex, except for the const fields.
struct CpuTicket {
  CpuTicket(const std::byte* src_, std::size_t bytes_, KeepAlive source_) : src(src_), bytes(bytes_), source(source_) {}

  const std::byte* const src;
  const std::size_t bytes;
  KeepAlive source;        // null once released
  bool is_wanted = false;  // the source must outlive its write: it was returned or prefetched
  bool is_dropped = false;
  bool is_written = false;  // the write ended; without `stored` it failed
  Workers::JobId write = 0;
  std::shared_ptr<const SpillBlock> stored;
  std::shared_ptr<CpuLoad> load;
};
using CpuTicketPtr = std::shared_ptr<CpuTicket>;

// Result of a get. Busy: call `wait`, then look again.
enum class Found { kSource, kDestination, kBusy, kNothing };

struct Lookup {
  Found found;
  KeepAlive keep;  // borrowed; valid until the ticket's next call
};

class CpuEngine {
 public:
  // A shared pointer that leaks the engine in a forked child, where destroying it would hang.
  static std::shared_ptr<CpuEngine> make(std::shared_ptr<SpillFile> file, const CpuConfig& config);
  ~CpuEngine() noexcept { shutdown(); }
  CpuEngine(const CpuEngine&) = delete;
  CpuEngine& operator=(const CpuEngine&) = delete;

  // Takes `source`, which keeps src[:bytes] alive and unchanged, and starts the write. Returns null and takes nothing
  // when the window is full: then `make_room(bytes)` and try again. Without `must` the tensor stays, and is counted.
  CpuTicketPtr try_put(const std::byte* src, std::size_t bytes, KeepAlive source, bool must, Released* released);
  void make_room(std::size_t bytes);

  // A number that changes with every failed write; no lock.
  std::uint64_t num_failed_writes() const { return num_failed_writes_; }

  // Never waits. Throws the error of a failed load (once: the next load tries again).
  Lookup look(const CpuTicketPtr& ticket, Released* released);

  // Starts to read into `dst`, which `keep` keeps alive; with `waits` reads in this thread. False, and `keep` is not
  // taken, if there is no need: the source is still held (and now stays), or a load exists already.
  bool load(const CpuTicketPtr& ticket, std::byte* dst, KeepAlive keep, bool waits, Released* released);

  // Waits until the ticket's load has ended; runs it in this thread if no worker has started it.
  void wait(const CpuTicketPtr& ticket);

  // Releases destination and revived source; the ticket can be loaded again.
  void unload(const CpuTicketPtr& ticket, Released* released);

  // Ends the ticket. Idempotent.
  void drop(const CpuTicketPtr& ticket, Released* released) noexcept;

  // References whose copies have ended since the last call.
  void collect(Released* released);

  // Waits until no write is queued or running; helps.
  void flush();

  // Cancels what no thread has started, joins the workers. Idempotent.
  void shutdown() noexcept;

  // Limits the bytes waiting to be written from now on; kFollowsSizes: the window of the settings.
  void limit_window(std::uint64_t bytes);

  // Starts the workers. How many the system granted; `why` it granted fewer.
  int start_workers(std::string* why) { return workers_->start_all(why); }

  CpuStats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using LoadPtr = std::shared_ptr<CpuLoad>;
  using Stored = std::shared_ptr<const SpillBlock>;

  CpuEngine(std::shared_ptr<SpillFile> file, const CpuConfig& config);
  void check_usable(const char* what) const;
  bool fits(std::size_t bytes) const;
  template <typename Done>
  void help_until(Lock* lock, const char* what, const Done& done);
  void write(const CpuTicketPtr& ticket);
  Stored written(const CpuTicket& ticket);
  void read(const CpuTicketPtr& ticket, const LoadPtr& load, const Stored& stored);
  void finish(Lock* lock, const LoadPtr& load, const Workers::Job& job);
  void abandon_load(CpuTicket* ticket);
  void release(KeepAlive* keep);
  void hand_over(Released* released);
  void note_change();
  void tell_released();

  const CpuConfig config_;
  const std::shared_ptr<SpillFile> file_;
  const ForkGuard fork_guard_;
  mutable std::mutex mutex_;  // guards all below; held while jobs are submitted and taken
  std::condition_variable changed_;
  std::uint64_t num_changes_ = 0;  // calls of `note_change`
  std::uint64_t num_pending_ = 0;  // writes queued or running
  bool is_closed_ = false;
  bool is_notified_ = false;                         // someone will collect `released_`
  std::atomic<std::uint64_t> num_failed_writes_{0};  // as in stats_
  Released released_;
  CpuStats stats_;
  Window window_;
  const std::shared_ptr<Workers> workers_;
};

}  // namespace actckpt
