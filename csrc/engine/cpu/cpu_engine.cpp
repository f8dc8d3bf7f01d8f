#include "engine/cpu/cpu_engine.h"

#include <algorithm>
#include <utility>

#include "engine/errors.h"
#include "engine/timing.h"

namespace actckpt {
namespace {

// Waking a worker takes longer than copying a few pages. Fewer bytes than this wait for more, or for a caller: `flush`
// and a put without room run the copy themselves.
constexpr std::size_t kWakeBytes = 256 << 10;

void count_once(CpuLoad* load, std::uint64_t* counter) {
  if (!std::exchange(load->is_counted, true)) {
    ++*counter;
  }
}

}  // namespace

std::shared_ptr<CpuEngine> CpuEngine::make(std::shared_ptr<SpillFile> file, const CpuConfig& config) {
  return std::shared_ptr<CpuEngine>(new CpuEngine(std::move(file), config), [](CpuEngine* engine) {
    if (!engine->fork_guard_.forked()) {
      delete engine;
    }
  });
}

CpuEngine::CpuEngine(std::shared_ptr<SpillFile> file, const CpuConfig& config)
    : config_(config),
      file_(std::move(file)),
      window_(config.window_bytes),
      workers_(Workers::make(config.num_workers, Workers::IfRefused::kCallersRunJobs)) {
  workers_->set_progress([this] {
    tell_released();
    return false;
  });
}

void CpuEngine::check_usable(const char* what) const {
  if (is_closed_) {
    throw OffloadError(std::string(what) + ": the offload engine was shut down.");
  }
}

bool CpuEngine::fits(std::size_t bytes) const {
  return stats_.inflight_bytes == 0 || stats_.inflight_bytes + bytes <= window_.bytes();
}

void CpuEngine::note_change() {
  ++num_changes_;
  changed_.notify_all();
}

CpuTicketPtr CpuEngine::try_put(const std::byte* src, std::size_t bytes, KeepAlive source, bool must,
                                Released* released) {
  fork_guard_.check("put");
  auto ticket = std::make_shared<CpuTicket>(src, bytes, source);
  const Lock lock(mutex_);
  check_usable("put");
  hand_over(released);
  if (!fits(bytes)) {
    stats_.num_kept_busy += must ? 0 : 1;
    return nullptr;
  }
  const bool wakes = stats_.inflight_bytes + bytes >= kWakeBytes;
  ticket->write = workers_->submit([this, ticket] { write(ticket); }, false, wakes);
  ++num_pending_;
  stats_.inflight_bytes += bytes;
  stats_.peak_inflight_bytes = std::max(stats_.peak_inflight_bytes, stats_.inflight_bytes);
  ++stats_.num_puts;
  ++stats_.num_live;
  window_.add(bytes);
  note_change();
  return ticket;
}

template <typename Done>
void CpuEngine::help_until(Lock* lock, const char* what, const Done& done) {
  while (!done()) {
    check_usable(what);
    const std::uint64_t seen = num_changes_;
    lock->unlock();
    const bool has_run = workers_->run_one();
    lock->lock();
    if (!has_run) {
      changed_.wait(*lock, [&] { return num_changes_ != seen; });
    }
  }
}

void CpuEngine::make_room(std::size_t bytes) {
  fork_guard_.check("put");
  Lock lock(mutex_);
  const Stopwatch watch;
  help_until(&lock, "put", [&] { return fits(bytes); });
  stats_.stall_seconds += watch.seconds();
}

CpuEngine::Stored CpuEngine::written(const CpuTicket& ticket) {
  bool is_full = false;
  bool is_gone = false;
  std::string why;
  try {
    return std::make_shared<SpillBlock>(file_->write(ticket.src, ticket.bytes));
  } catch (const OffloadFullError& error) {
    is_full = true;
    why = error.what();
  } catch (const SourceGoneError&) {
    is_gone = true;
  } catch (const std::exception& error) {
    why = error.what();
  }
  const Lock lock(mutex_);
  num_failed_writes_ = ++stats_.num_failed_writes;
  stats_.num_full_writes += is_full ? 1 : 0;
  stats_.num_gone_sources += is_gone ? 1 : 0;
  if (!is_gone) {
    stats_.last_error = why;
  }
  return nullptr;
}

void CpuEngine::write(const CpuTicketPtr& ticket) {
  const Stored stored = written(*ticket);
  const Lock lock(mutex_);
  ticket->is_written = true;
  --num_pending_;
  stats_.inflight_bytes -= ticket->bytes;
  stats_.written_bytes += stored != nullptr ? ticket->bytes : 0;
  if (ticket->is_dropped) {
    stats_.graveyard_bytes -= ticket->bytes;
  } else if (stored != nullptr) {
    ticket->stored = stored;
    stats_.stored_bytes += ticket->bytes;
    stats_.peak_stored_bytes = std::max(stats_.peak_stored_bytes, stats_.stored_bytes);
  } else {
    stats_.kept_bytes += ticket->bytes;
  }
  if (ticket->is_dropped || (stored != nullptr && !ticket->is_wanted)) {
    release(&ticket->source);
  }
  note_change();
}

void CpuEngine::read(const CpuTicketPtr& ticket, const LoadPtr& load, const Stored& stored) {
  std::exception_ptr error;
  try {
    file_->read(*stored, load->dst);
  } catch (...) {
    error = std::current_exception();
  }
  const Lock lock(mutex_);
  load->has_ended = true;
  load->error = error;
  stats_.loaded_bytes += error == nullptr ? ticket->bytes : 0;
  if (ticket->load != load) {  // abandoned meanwhile
    stats_.graveyard_bytes -= ticket->bytes;
    release(&load->keep);
  }
  note_change();
}

Lookup CpuEngine::look(const CpuTicketPtr& ticket, Released* released) {
  fork_guard_.check("get");
  const Lock lock(mutex_);
  check_usable("get");
  if (ticket->is_dropped) {
    throw OffloadError("get: this ticket was dropped.");
  }
  CpuLoad* const load = ticket->load.get();
  if (load != nullptr && load->error != nullptr) {
    const std::exception_ptr error = load->error;
    abandon_load(ticket.get());
    std::rethrow_exception(error);
  }
  hand_over(released);
  if (ticket->source != nullptr) {
    ticket->is_wanted = true;
    ++stats_.num_revived;
    return {Found::kSource, ticket->source};
  }
  if (load == nullptr) {
    return {Found::kNothing, nullptr};
  }
  if (!load->has_ended) {
    return {Found::kBusy, nullptr};
  }
  count_once(load, &stats_.num_prefetched);
  return {Found::kDestination, load->keep};
}

bool CpuEngine::load(const CpuTicketPtr& ticket, std::byte* dst, KeepAlive keep, bool waits, Released* released) {
  fork_guard_.check("load");
  Lock lock(mutex_);
  check_usable("load");
  if (ticket->is_dropped) {
    throw OffloadError("load: this ticket was dropped.");
  }
  hand_over(released);  // what throws hands over nothing
  ticket->is_wanted = ticket->is_wanted || ticket->source != nullptr;
  if (ticket->source != nullptr || ticket->load != nullptr) {
    return false;
  }
  const auto load = std::make_shared<CpuLoad>(dst, keep);
  Workers::Job job = [this, ticket, load, stored = ticket->stored] { read(ticket, load, stored); };
  if (!waits) {
    load->job = workers_->submit(std::move(job), true);
  }
  ticket->load = load;
  if (waits) {
    finish(&lock, load, job);
  }
  return true;
}

void CpuEngine::wait(const CpuTicketPtr& ticket) {
  fork_guard_.check("get");
  Lock lock(mutex_);
  if (const LoadPtr load = ticket->load) {
    finish(&lock, load, workers_->take(load->job));
  }
}

// Runs the job of a load, or waits for whoever runs it.
void CpuEngine::finish(Lock* lock, const LoadPtr& load, const Workers::Job& job) {
  const Stopwatch watch;
  count_once(load.get(), &stats_.num_late);
  if (job != nullptr) {
    lock->unlock();
    job();
    lock->lock();
  } else {
    changed_.wait(*lock, [&] { return load->has_ended; });
  }
  stats_.stall_seconds += watch.seconds();
}

void CpuEngine::abandon_load(CpuTicket* ticket) {
  const LoadPtr load = std::exchange(ticket->load, nullptr);
  if (load == nullptr) {
    return;
  }
  if (load->has_ended || workers_->take(load->job) != nullptr) {
    release(&load->keep);
  } else {
    stats_.graveyard_bytes += ticket->bytes;  // `read` releases it
  }
}

void CpuEngine::unload(const CpuTicketPtr& ticket, Released* released) {
  fork_guard_.check("unload");
  const Lock lock(mutex_);
  if (!ticket->is_dropped) {
    ticket->is_wanted = false;
    if (ticket->stored != nullptr) {
      release(&ticket->source);
    }
    abandon_load(ticket.get());
  }
  hand_over(released);
}

void CpuEngine::drop(const CpuTicketPtr& ticket, Released* released) noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  Stored stored;
  const Lock lock(mutex_);
  if (!std::exchange(ticket->is_dropped, true)) {
    --stats_.num_live;
    window_.remove(ticket->bytes);
    if (!ticket->is_written && workers_->take(ticket->write) == nullptr) {
      stats_.graveyard_bytes += ticket->bytes;  // `write` releases the source
    } else {
      if (!ticket->is_written) {
        --num_pending_;
        stats_.inflight_bytes -= ticket->bytes;
        note_change();
      }
      release(&ticket->source);
    }
    stored = std::move(ticket->stored);
    if (stored != nullptr) {
      stats_.stored_bytes -= ticket->bytes;
    } else {
      stats_.kept_bytes -= ticket->is_written ? ticket->bytes : 0;
    }
    abandon_load(ticket.get());
  }
  hand_over(released);
}

void CpuEngine::release(KeepAlive* keep) {
  if (*keep != nullptr) {
    released_.push_back(std::exchange(*keep, nullptr));
  }
}

void CpuEngine::hand_over(Released* released) {
  released->insert(released->end(), released_.begin(), released_.end());
  released_.clear();
  is_notified_ = false;
}

void CpuEngine::tell_released() {
  Lock lock(mutex_);
  if (config_.tell_released == nullptr || released_.empty() || is_notified_) {
    return;
  }
  is_notified_ = true;  // first: a concurrent `collect` resets it
  lock.unlock();
  const bool is_notified = config_.tell_released();
  lock.lock();
  is_notified_ = is_notified_ && is_notified;
}

void CpuEngine::collect(Released* released) {
  fork_guard_.check("poll");
  const Lock lock(mutex_);
  hand_over(released);
}

void CpuEngine::flush() {
  fork_guard_.check("flush");
  Lock lock(mutex_);
  help_until(&lock, "flush", [&] { return num_pending_ == 0; });
}

void CpuEngine::shutdown() noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  {
    const Lock lock(mutex_);
    is_closed_ = true;
    note_change();
  }
  workers_->stop();
}

void CpuEngine::limit_window(std::uint64_t bytes) {
  fork_guard_.check("limit_window");
  const Lock lock(mutex_);
  window_.limit(bytes);
  note_change();  // waiters for room may have it now
}

CpuStats CpuEngine::stats() const {
  fork_guard_.check("stats");
  const Lock lock(mutex_);
  CpuStats now = stats_;
  now.window_bytes = window_.bytes();
  now.num_queued = workers_->num_queued();
  return now;
}

}  // namespace actckpt
