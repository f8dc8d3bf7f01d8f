#include "engine/host/host_engine.h"

#include <algorithm>
#include <system_error>

#include "engine/errors.h"
#include "engine/timing.h"

namespace actckpt {
namespace {

// Waking a worker takes longer than copying a few pages. Fewer bytes than this wait for more, or for whoever needs them
// written: `flush`, a put without room, and a dropped source each start the copy themselves.
constexpr std::size_t kWakeBytes = 256 << 10;

void count_once(Load* load, std::uint64_t* counter) {
  if (!load->counted) {
    load->counted = true;
    ++*counter;
  }
}

}  // namespace

std::shared_ptr<HostEngine> HostEngine::make(const HostConfig& config) {
  return std::shared_ptr<HostEngine>(new HostEngine(config), [](HostEngine* engine) {
    if (!engine->fork_guard_.forked()) {
      delete engine;
    }
  });
}

HostEngine::HostEngine(const HostConfig& config) : config_(config), window_(config.window_bytes) {
  try {
    for (int i = 0; i < config.num_workers; ++i) {
      workers_.emplace_back(&HostEngine::work, this);
    }
  } catch (const std::system_error& error) {  // the existing threads do it, or callers
    stats_.last_error = format_errno(error.code().value());
  }
  stats_.num_workers = static_cast<int>(workers_.size());
}

HostEngine::~HostEngine() noexcept { shutdown(); }

void HostEngine::check_usable(const char* what) const {
  if (closed_) {
    throw OffloadError(std::string(what) + ": the offload engine was shut down.");
  }
}

bool HostEngine::fits(std::size_t bytes) const {
  return stats_.inflight_bytes == 0 || stats_.inflight_bytes + bytes <= window_.bytes();
}

TicketPtr HostEngine::try_put(const std::byte* src, std::size_t bytes, std::shared_ptr<ByteStore> store,
                              KeepAlive source, Released* released) {
  fork_guard_.check("put");
  auto ticket = std::make_shared<Ticket>(src, bytes, store.get(), source);
  const Lock lock(mutex_);
  check_usable("put");
  hand_over(released);
  if (!fits(bytes)) {
    return nullptr;
  }
  if (std::find(stores_.begin(), stores_.end(), store) == stores_.end()) {
    stores_.push_back(std::move(store));
  }
  ticket->queued = writes_.insert(writes_.end(), ticket);
  ++num_pending_;
  stats_.inflight_bytes += bytes;
  stats_.peak_inflight_bytes = std::max(stats_.peak_inflight_bytes, stats_.inflight_bytes);
  ++stats_.num_puts;
  ++stats_.num_live;
  window_.add(bytes);
  if (num_idle_ > 0 && stats_.inflight_bytes >= kWakeBytes) {
    work_.notify_one();
  }
  return ticket;
}

void HostEngine::make_room(std::size_t bytes) {
  fork_guard_.check("put");
  Lock lock(mutex_);
  const Stopwatch watch;
  while (!fits(bytes)) {
    check_usable("put");
    if (const TicketPtr ticket = claim_write()) {
      run_write(lock, ticket);
    } else {
      ++num_waiting_;
      done_.wait(lock);
      --num_waiting_;
    }
  }
  stats_.stall_seconds += watch.seconds();
}

void HostEngine::count_kept_busy() {
  const Lock lock(mutex_);
  ++stats_.num_kept_busy;
}

Lookup HostEngine::look(const TicketPtr& ticket, Released* released) {
  fork_guard_.check("get");
  const Lock lock(mutex_);
  check_usable("get");
  hand_over(released);
  if (ticket->dropped) {
    throw OffloadError("get: this ticket was dropped.");
  }
  if (ticket->source != nullptr) {
    ticket->wanted = true;
    ++stats_.num_revived;
    return {Found::kSource, ticket->source};
  }
  if (ticket->load == nullptr) {
    return {Found::kNothing, nullptr};
  }
  if (ticket->load->state == LoadState::kReady) {
    count_once(ticket->load.get(), &stats_.num_prefetched);
    return {Found::kDestination, ticket->load->keep};
  }
  if (ticket->load->state == LoadState::kFailed) {
    const std::exception_ptr error = ticket->load->error;
    abandon_load(ticket);
    std::rethrow_exception(error);
  }
  return {Found::kBusy, nullptr};
}

LoadPtr HostEngine::add_load(const TicketPtr& ticket, std::byte* dst, KeepAlive keep) {
  check_usable("load");
  if (ticket->dropped) {
    throw OffloadError("load: this ticket was dropped.");
  }
  if (ticket->source != nullptr) {
    ticket->wanted = true;
    return nullptr;
  }
  if (ticket->load != nullptr) {
    return nullptr;
  }
  ticket->load = std::make_shared<Load>(dst, keep);
  return ticket->load;
}

bool HostEngine::start_load(const TicketPtr& ticket, std::byte* dst, KeepAlive keep, Released* released) {
  fork_guard_.check("prefetch");
  const Lock lock(mutex_);
  hand_over(released);
  const LoadPtr load = add_load(ticket, dst, keep);
  if (load == nullptr) {
    return false;
  }
  load->queued = loads_.emplace(loads_.end(), ticket, load);
  if (num_idle_ > 0) {
    work_.notify_one();
  }
  return true;
}

bool HostEngine::load_here(const TicketPtr& ticket, std::byte* dst, KeepAlive keep, Released* released) {
  fork_guard_.check("load");
  Lock lock(mutex_);
  hand_over(released);
  const LoadPtr load = add_load(ticket, dst, keep);
  if (load == nullptr) {
    return false;
  }
  const Stopwatch watch;
  count_once(load.get(), &stats_.num_late);
  load->state = LoadState::kReading;
  ++ticket->num_readers;
  run_load(lock, ticket, load);
  stats_.stall_seconds += watch.seconds();
  return true;
}

void HostEngine::wait(const TicketPtr& ticket) {
  fork_guard_.check("get");
  Lock lock(mutex_);
  const LoadPtr load = ticket->load;
  if (load == nullptr) {
    return;
  }
  const Stopwatch watch;
  count_once(load.get(), &stats_.num_late);
  if (load->state == LoadState::kQueued) {
    loads_.erase(load->queued);
    load->state = LoadState::kReading;
    ++ticket->num_readers;
    run_load(lock, ticket, load);
  } else {
    ++num_waiting_;
    done_.wait(lock, [&] { return load->state != LoadState::kReading; });
    --num_waiting_;
  }
  stats_.stall_seconds += watch.seconds();
}

void HostEngine::abandon_load(const TicketPtr& ticket) {
  const LoadPtr load = std::move(ticket->load);
  ticket->load = nullptr;
  if (load == nullptr) {
    return;
  }
  if (load->state == LoadState::kReading) {
    stats_.graveyard_bytes += ticket->bytes;  // run_load releases `keep`
    return;
  }
  if (load->state == LoadState::kQueued) {
    loads_.erase(load->queued);
  }
  release(&load->keep);
}

void HostEngine::unload(const TicketPtr& ticket, Released* released) {
  fork_guard_.check("unload");
  const Lock lock(mutex_);
  if (!ticket->dropped) {
    ticket->wanted = false;
    if (ticket->out == OutState::kStored) {
      release(&ticket->source);
    }
    abandon_load(ticket);
  }
  hand_over(released);
}

void HostEngine::drop(const TicketPtr& ticket, Released* released) noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  std::unique_ptr<StoredBytes> stored;
  const Lock lock(mutex_);
  if (!ticket->dropped) {
    ticket->dropped = true;
    --stats_.num_live;
    window_.remove(ticket->bytes);
    if (ticket->out == OutState::kQueued) {
      ticket->out = OutState::kCancelled;
      writes_.erase(ticket->queued);
      stats_.inflight_bytes -= ticket->bytes;
      --num_pending_;
      if (num_waiting_ > 0) {
        done_.notify_all();
      }
    }
    stats_.kept_bytes -= ticket->out == OutState::kKept ? ticket->bytes : 0;
    if (ticket->out == OutState::kWriting) {
      stats_.graveyard_bytes += ticket->bytes;  // run_write releases the source
    } else {
      release(&ticket->source);
    }
    abandon_load(ticket);
    stored = take_stored(ticket.get());
  }
  hand_over(released);
}

void HostEngine::collect(Released* released) {
  fork_guard_.check("poll");
  const Lock lock(mutex_);
  hand_over(released);
}

void HostEngine::flush() {
  fork_guard_.check("flush");
  Lock lock(mutex_);
  while (num_pending_ > 0) {
    check_usable("flush");
    if (const TicketPtr ticket = claim_write()) {
      run_write(lock, ticket);
    } else {
      ++num_waiting_;
      done_.wait(lock);
      --num_waiting_;
    }
  }
}

void HostEngine::shutdown() noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  std::vector<std::thread> workers;
  {
    const Lock lock(mutex_);
    closed_ = true;
    workers.swap(workers_);
    work_.notify_all();
    done_.notify_all();
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
}

void HostEngine::limit_window(std::uint64_t bytes) {
  fork_guard_.check("limit_window");
  const Lock lock(mutex_);
  window_.limit(bytes);
  done_.notify_all();  // waiters for room may have it now
}

HostStats HostEngine::stats() const {
  fork_guard_.check("stats");
  const Lock lock(mutex_);
  HostStats now = stats_;
  now.window_bytes = window_.bytes();
  now.num_queued = writes_.size() + loads_.size();
  return now;
}

}  // namespace actckpt
