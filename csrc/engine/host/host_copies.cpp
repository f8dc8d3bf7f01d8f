// The half of HostEngine that runs copies: claiming them, running them unlocked, settling their results. See
// NOTE [Ticket states] in ticket.h.

#include <utility>

#include "engine/errors.h"
#include "engine/host/host_engine.h"

namespace actckpt {

TicketPtr HostEngine::claim_write() {
  if (writes_.empty()) {
    return nullptr;
  }
  TicketPtr ticket = std::move(writes_.front());
  writes_.pop_front();
  ticket->out = OutState::kWriting;
  return ticket;
}

std::pair<TicketPtr, LoadPtr> HostEngine::claim_load() {
  if (loads_.empty()) {
    return {};
  }
  auto job = std::move(loads_.front());
  loads_.pop_front();
  job.second->state = LoadState::kReading;
  ++job.first->num_readers;
  return job;
}

void HostEngine::work() {
  Lock lock(mutex_);
  while (!closed_) {
    auto job = claim_load();  // a caller will wait for it sooner than for a write
    if (job.first != nullptr) {
      run_load(lock, job.first, job.second);
    } else if (const TicketPtr ticket = claim_write()) {
      run_write(lock, ticket);
    } else {
      ++num_idle_;
      work_.wait(lock);
      --num_idle_;
    }
    tell_released(lock);
  }
}

void HostEngine::tell_released(Lock& lock) {
  if (config_.tell_released == nullptr || released_.empty() || is_notified_) {
    return;
  }
  is_notified_ = true;  // first: a concurrent `collect` resets it
  lock.unlock();
  const bool is_notified = config_.tell_released();
  lock.lock();
  is_notified_ = is_notified_ && is_notified;
}

void HostEngine::run_write(Lock& lock, const TicketPtr& ticket) {
  lock.unlock();
  Write write = written(*ticket);
  lock.lock();
  stats_.inflight_bytes -= ticket->bytes;
  --num_pending_;
  if (write.stored != nullptr) {
    ticket->out = OutState::kStored;
    stats_.written_bytes += ticket->bytes;
    stats_.stored_bytes += ticket->bytes;
    stats_.peak_stored_bytes = std::max(stats_.peak_stored_bytes, stats_.stored_bytes);
    ticket->stored = std::move(write.stored);
  } else {
    note_kept(ticket.get(), write);
  }
  std::unique_ptr<StoredBytes> dropped;
  if (ticket->dropped) {
    stats_.graveyard_bytes -= ticket->bytes;
    dropped = take_stored(ticket.get());
  }
  if (ticket->dropped || (ticket->out == OutState::kStored && !ticket->wanted)) {
    release(&ticket->source);
  }
  if (num_waiting_ > 0) {
    done_.notify_all();
  }
  if (dropped != nullptr) {
    lock.unlock();
    dropped.reset();
    lock.lock();
  }
}

HostEngine::Write HostEngine::written(const Ticket& ticket) {
  Write write;
  try {
    write.stored = ticket.store->write(ticket.src, ticket.bytes);
  } catch (const OffloadFullError& failed) {
    write.error = failed.what();
    write.is_full = true;
  } catch (const SourceGoneError& failed) {
    write.error = failed.what();
    write.is_gone = true;
  } catch (const std::exception& failed) {
    write.error = failed.what();
  }
  return write;
}

void HostEngine::note_kept(Ticket* ticket, const Write& failed) {
  ticket->out = OutState::kKept;
  ++stats_.num_failed_writes;
  stats_.num_full_writes += failed.is_full ? 1 : 0;
  stats_.num_gone_sources += failed.is_gone ? 1 : 0;
  num_failed_writes_ = stats_.num_failed_writes;
  if (!failed.is_gone) {
    stats_.last_error = failed.error;
  }
  stats_.kept_bytes += ticket->dropped ? 0 : ticket->bytes;
}

void HostEngine::run_load(Lock& lock, const TicketPtr& ticket, const LoadPtr& load) {
  lock.unlock();
  std::exception_ptr error;
  try {
    ticket->store->read(*ticket->stored, load->dst);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  --ticket->num_readers;
  load->state = error == nullptr ? LoadState::kReady : LoadState::kFailed;
  load->error = error;
  stats_.loaded_bytes += error == nullptr ? ticket->bytes : 0;
  if (ticket->load != load) {  // abandoned meanwhile
    stats_.graveyard_bytes -= ticket->bytes;
    release(&load->keep);
  }
  std::unique_ptr<StoredBytes> stored;
  if (ticket->dropped) {
    stored = take_stored(ticket.get());
  }
  if (num_waiting_ > 0) {
    done_.notify_all();
  }
  if (stored != nullptr) {
    lock.unlock();
    stored.reset();
    lock.lock();
  }
}

std::unique_ptr<StoredBytes> HostEngine::take_stored(Ticket* ticket) {
  if (ticket->num_readers > 0 || ticket->stored == nullptr) {
    return nullptr;
  }
  stats_.stored_bytes -= ticket->bytes;
  return std::move(ticket->stored);
}

void HostEngine::release(KeepAlive* keep) {
  if (*keep != nullptr) {
    released_.push_back(std::exchange(*keep, nullptr));
  }
}

void HostEngine::hand_over(Released* released) {
  released->insert(released->end(), released_.begin(), released_.end());
  released_.clear();
  is_notified_ = false;
}

}  // namespace actckpt
