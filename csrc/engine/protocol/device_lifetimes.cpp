// The half of DeviceEngine that releases sources, destinations and tickets: in time, and no earlier.

#include <algorithm>
#include <utility>

#include "engine/errors.h"
#include "engine/protocol/device_engine.h"
#include "engine/protocol/uses.h"

namespace actckpt {

// Whether copies lag: bytes whose source is ready but whose copy has not ended fill the window. Bytes whose source is
// not written yet do not count: the host merely runs ahead (trap 11).
bool DeviceEngine::lags(int device, std::uint64_t bytes) {
  const Fly& fly = fly_[device];
  if (fly.bytes() + bytes <= window_.bytes() || fly.flights.empty()) {
    return false;
  }
  std::uint64_t backlog = bytes;
  for (const std::shared_ptr<Flight>& flight : fly.flights) {
    if (!backend_->passed(flight->ready)) {
      break;
    }
    backlog += flight->bytes;
  }
  return backlog > window_.bytes();
}

// Line 6: beyond the window the stream waits, not the host, and the oldest sources are released at once.
void DeviceEngine::shrink_window(Stream stream, Releases* releases) {
  Fly& fly = fly_[stream.device];
  std::uint64_t left = fly.bytes();
  std::size_t num_oldest = 0;
  while (left > window_.bytes() && num_oldest < fly.flights.size()) {
    left -= fly.flights[num_oldest++]->bytes;
  }
  if (num_oldest > 0 && config_.rules.stream_waits_before_early_release) {
    waits_.wait(backend_.get(), stream, fly.flights[num_oldest - 1]->d2h);
  }
  for (; num_oldest > 0; --num_oldest) {
    const std::shared_ptr<Flight> oldest = std::move(fly.flights.front());
    fly.flights.pop_front();
    fly.flight_bytes -= oldest->bytes;
    ++stats_.num_early_releases;
    add_use(&oldest->uses, stream);
    release(oldest.get(), releases);
  }
  shrink_graves(&fly, releases);
}

void DeviceEngine::make_room(Stream stream, Releases* releases) {
  fork_guard_.check("make_room");
  const Lock lock(calls_);
  const std::optional<DeviceScope> scope = entered(stream.device);
  settle(releases);
  if (failed_) {
    return;
  }
  try {
    if (!backend_->capturing(stream)) {
      shrink_window(stream, releases);
    }
  } catch (const DeviceError& error) {
    fail("make_room", error);
  }
}

// Nobody reads a destination in its grave. Only its next owner, on the stream it was allocated on, must wait for the
// copy into it.
void DeviceEngine::shrink_graves(Fly* fly, Releases* releases) {
  while (fly->bytes() > window_.bytes() && !fly->graves.empty()) {
    const Grave oldest = fly->graves.front();
    if (backend_->capturing(oldest.home)) {
      return;
    }
    if (config_.rules.home_waits_for_early_grave) {
      backend_->wait(oldest.home, oldest.last);
    }
    fly->graves.pop_front();
    fly->grave_bytes -= oldest.bytes;
    stats_.graveyard_bytes -= oldest.bytes;
    ++stats_.num_early_releases;
    releases->push_back({oldest.keep, {}});
  }
}

// Line r: what the caller must do with the source.
void DeviceEngine::release(Flight* flight, Releases* releases) {
  if (flight->keep == nullptr) {
    return;
  }
  Uses uses = config_.rules.record_stream_on_sources ? std::move(flight->uses) : Uses();
  releases->push_back({std::exchange(flight->keep, nullptr), std::move(uses)});
}

void DeviceEngine::unload(const DeviceTicketPtr& ticket, Releases* releases) {
  fork_guard_.check("unload");
  const Lock lock(calls_);
  settle(releases);
  bury_landing(ticket.get(), releases);
}

void DeviceEngine::drop(const DeviceTicketPtr& ticket, Releases* releases) noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(dropped_mutex_);
    dropped_.push_back(ticket);
  }
  // The holder of `calls_` may be in the middle of device calls: then the next call buries it.
  const Lock lock(calls_, std::try_to_lock);
  if (lock.owns_lock()) {
    bury_dropped(releases);
  }
}

void DeviceEngine::bury_dropped(Releases* releases) {
  std::vector<DeviceTicketPtr> dropped;
  {
    const std::lock_guard<std::mutex> lock(dropped_mutex_);
    dropped.swap(dropped_);
  }
  for (const DeviceTicketPtr& ticket : dropped) {
    if (!std::exchange(ticket->dropped, true)) {
      bury(ticket.get(), releases);
    }
  }
}

// Lines 12, 13, 19. The flight stays in fly_ until its copy has passed; it counts toward the window.
void DeviceEngine::bury(DeviceTicket* ticket, Releases* releases) {
  --stats_.num_live;
  window_.remove(ticket->bytes);
  if (!ticket->pieces.empty()) {
    stats_.tier_bytes -= ticket->bytes;
  }
  bury_landing(ticket, releases);
  if (ticket->flight != nullptr && !config_.rules.source_outlives_dropped_ticket) {
    release(ticket->flight.get(), releases);
  }
  ticket->flight = nullptr;
  if (failed_) {
    stranded_slots_.push_back(std::move(ticket->slot));
    stranded_pieces_.push_back(std::move(ticket->pieces));
    stats_.stranded_bytes += ticket->bytes;
    return;
  }
  if (!ticket->pieces.empty()) {
    spills_.drop(&ticket->pieces);
    return;
  }
  Fences fences;
  for (EventPtr& last : ticket->last) {
    if (last != nullptr) {
      fences.push_back(std::move(last));
    }
  }
  slots_.give(std::move(ticket->slot), std::move(fences));
}

void DeviceEngine::bury_landing(DeviceTicket* ticket, Releases* releases) {
  const LandingPtr landing = std::move(ticket->landing);
  ticket->landing = nullptr;
  if (landing == nullptr) {
    return;
  }
  landing->is_abandoned = true;
  const bool may_be_written = landing->h2d != nullptr || failed_;
  if (may_be_written && landing->waited.empty() && config_.rules.unread_prefetch_outlives_copy) {
    Fly& fly = fly_[ticket->device];
    fly.graves.push_back({landing->keep, ticket->bytes, landing->home, landing->h2d});
    fly.grave_bytes += ticket->bytes;
    stats_.graveyard_bytes += ticket->bytes;
  } else {
    releases->push_back({landing->keep, {}});
  }
}

void DeviceEngine::poll(Releases* releases) {
  fork_guard_.check("poll");
  const Lock lock(calls_);
  settle(releases);
}

// Lines 5, 13, 17 and 18.
void DeviceEngine::settle(Releases* releases) {
  bury_dropped(releases);
  if (failed_) {
    return;
  }
  try {
    for (auto& [device, fly] : fly_) {
      settle_device(device, &fly, releases);
    }
    slots_.settle();
    spills_.advance();
    const StreamWaits::Sum sum = waits_.settle(backend_.get());
    stats_.stall_seconds += sum.seconds;
    stats_.num_late += sum.num_late;
  } catch (const DeviceError& error) {
    fail("query", error);
  }
}

void DeviceEngine::settle_device(int device, Fly* fly, Releases* releases) {
  if (fly->flights.empty() && fly->graves.empty()) {
    return;
  }
  const DeviceScope scope(backend_.get(), device);
  while (!fly->flights.empty() && backend_->passed(fly->flights.front()->d2h)) {
    const std::shared_ptr<Flight> oldest = std::move(fly->flights.front());
    fly->flights.pop_front();
    fly->flight_bytes -= oldest->bytes;
    release(oldest.get(), releases);
  }
  for (auto grave = fly->graves.begin(); grave != fly->graves.end();) {
    if (!backend_->passed(grave->last)) {
      ++grave;
      continue;
    }
    stats_.graveyard_bytes -= grave->bytes;
    fly->grave_bytes -= grave->bytes;
    releases->push_back({grave->keep, {}});
    grave = fly->graves.erase(grave);
  }
}

void DeviceEngine::flush() {
  fork_guard_.check("flush");
  Lock lock(calls_);
  try {
    while (!failed_ && spills_.advance() && spills_.is_writing()) {
      pause(lock);
    }
  } catch (const DeviceError& error) {
    fail("flush", error);
  }
}

bool DeviceEngine::advance() noexcept {
  const Lock lock(calls_);
  if (failed_) {
    return false;
  }
  bool is_busy = false;
  try {
    is_busy = spills_.advance();
  } catch (const DeviceError& error) {
    fail("advance", error);
  }
  moved_.notify_all();
  return is_busy;
}

void DeviceEngine::finish(Releases* releases) noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  Lock lock(calls_);
  settle(releases);
  try {
    for (const auto& [device, fly] : fly_) {
      for (const Side side : {Side::kOut, Side::kIn, Side::kUrgent}) {
        const DeviceScope scope(backend_.get(), device);
        const EventPtr last = failed_ ? nullptr : backend_->record(backend_->side(device, side));
        while (!failed_ && !backend_->passed(last)) {
          pause(lock);
        }
      }
    }
  } catch (const DeviceError& error) {
    fail("finish", error);
  }
  settle(releases);
}

void DeviceEngine::close() noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  const Lock lock(calls_);
  if (!failed_) {
    failed_ = true;
    stats_.last_error = "the process is ending";
  }
  moved_.notify_all();
}

void DeviceEngine::check_working(const char* what) const {
  if (failed_) {
    throw DeviceError(std::string(what) + ": an earlier device call failed: " + stats_.last_error +
                      ". The offloaded bytes cannot be brought back.");
  }
}

// One scope for everything that a call does on a device: each scope costs driver calls. None once the engine has
// failed.
std::optional<DeviceScope> DeviceEngine::entered(int device) {
  if (failed_) {
    return std::nullopt;
  }
  try {
    return std::optional<DeviceScope>(std::in_place, backend_.get(), device);
  } catch (const DeviceError& error) {
    fail("enter", error);
    return std::nullopt;
  }
}

bool DeviceEngine::captures(Stream stream, const char* what) {
  try {
    return backend_->capturing(stream);
  } catch (const DeviceError& error) {
    fail(what, error);
    throw;
  }
}

void DeviceEngine::fail(const char* what, const std::exception& error) {
  if (!std::exchange(failed_, true)) {
    stats_.last_error = std::string(what) + ": " + error.what();
  }
  moved_.notify_all();
}

void DeviceEngine::limit_window(std::uint64_t bytes) {
  fork_guard_.check("limit_window");
  const Lock lock(calls_);
  window_.limit(bytes);
}

DeviceStats DeviceEngine::stats() {
  fork_guard_.check("stats");
  const Lock lock(calls_);
  DeviceStats now = stats_;
  for (const auto& [device, fly] : fly_) {
    now.inflight_bytes += fly.bytes();
  }
  now.window_bytes = window_.bytes();
  now.bounce_bytes = spills_.pinned_bytes();
  now.spill = spills_.counts();
  return now;
}

}  // namespace actckpt
