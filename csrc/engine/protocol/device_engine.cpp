#include "engine/protocol/device_engine.h"

#include <algorithm>
#include <utility>

#include "engine/errors.h"

namespace actckpt {
namespace {

bool contains(const Uses& uses, Stream stream) {
  return std::find(uses.begin(), uses.end(), stream) != uses.end();
}

void add_use(Uses* uses, Stream stream) {
  if (!contains(*uses, stream)) {
    uses->push_back(stream);
  }
}

constexpr int index(Side side) { return static_cast<int>(side); }

}  // namespace

DeviceEngine::DeviceEngine(std::shared_ptr<Backend> backend, std::shared_ptr<Pool> pool,
                           const DeviceConfig& config)
    : backend_(std::move(backend)),
      config_(config),
      slots_(std::move(pool), backend_.get(), config.rules) {}

Put DeviceEngine::put(std::uintptr_t src, std::uint64_t bytes, Stream stream, KeepAlive keep,
                      Releases* releases) {
  fork_guard_.check("put");
  const Lock lock(calls_);
  settle(releases);
  auto ticket = std::make_shared<DeviceTicket>();
  ticket->device = stream.device;
  ticket->bytes = bytes;
  ticket->put_stream = stream;
  if (failed_) {
    ++stats_.num_kept_failed;
    return {PutOutcome::kKeptFailed, nullptr};
  }
  try {
    const DeviceScope scope(backend_.get(), stream.device);
    if (backend_->capturing(stream)) {  // line 1
      ++stats_.num_kept_capturing;
      return {PutOutcome::kKeptCapturing, nullptr};
    }
    Fences fences;
    std::optional<Block> slot = slots_.take(bytes, &fences);  // line 3
    if (!slot.has_value()) {
      ++stats_.num_kept_full;
      return {PutOutcome::kKeptFull, nullptr};
    }
    ticket->slot = std::move(*slot);
    ticket->flight = std::make_shared<Flight>(Flight{keep, bytes, nullptr, {stream}});
    write_out(ticket.get(), src, stream, fences);
    Fly& fly = fly_[stream.device];
    fly.flights.push_back(ticket->flight);
    fly.bytes += bytes;
    ++stats_.num_puts;
    ++stats_.num_live;
    stats_.offloaded_bytes += bytes;
    stats_.peak_inflight_bytes = std::max(stats_.peak_inflight_bytes, fly.bytes);
    shrink_window(stream.device, stream, releases);
  } catch (const DeviceError& error) {
    fail("put", error);
    ++stats_.num_kept_failed;
    stranded_.push_back({keep, bytes, nullptr});
    stranded_slots_.push_back(std::move(ticket->slot));
    stats_.stranded_bytes += bytes;
    return {PutOutcome::kKeptStranded, nullptr};
  }
  return {PutOutcome::kTaken, std::move(ticket)};
}

// Line 4.
void DeviceEngine::write_out(DeviceTicket* ticket, std::uintptr_t src, Stream stream,
                             const Fences& fences) {
  const Stream out = backend_->side(ticket->device, Side::kOut);
  if (config_.rules.write_out_waits_for_stream) {
    backend_->wait(out, backend_->record(stream));
  }
  if (config_.rules.slot_owner_waits) {
    for (const EventPtr& fence : fences) {
      backend_->wait(out, fence);
    }
  }
  backend_->copy_out(out, ticket->slot, src);
  ticket->flight->d2h = backend_->record(out);
  ticket->last[index(Side::kOut)] = ticket->flight->d2h;
}

// Line 6: beyond the window the stream, not the host, waits, and the oldest sources go at once.
void DeviceEngine::shrink_window(int device, Stream stream, Releases* releases) {
  Fly& fly = fly_[device];
  std::uint64_t left = fly.bytes;
  std::size_t num_oldest = 0;
  while (left > config_.window_bytes) {
    left -= fly.flights[num_oldest++]->bytes;
  }
  if (num_oldest == 0) {
    return;
  }
  if (config_.rules.stream_waits_before_early_release) {
    backend_->wait(stream, fly.flights[num_oldest - 1]->d2h);
  }
  for (; num_oldest > 0; --num_oldest) {
    const std::shared_ptr<Flight> oldest = std::move(fly.flights.front());
    fly.flights.pop_front();
    fly.bytes -= oldest->bytes;
    ++stats_.num_early_releases;
    add_use(&oldest->uses, stream);
    release(oldest.get(), releases);
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

void DeviceEngine::use(const DeviceTicketPtr& ticket, Stream stream) {
  fork_guard_.check("use");
  const Lock lock(calls_);
  if (ticket->flight != nullptr && ticket->flight->keep != nullptr) {
    add_use(&ticket->flight->uses, stream);
  }
}

Got DeviceEngine::get(const DeviceTicketPtr& ticket, Stream stream, Releases* releases) {
  fork_guard_.check("get");
  const Lock lock(calls_);
  if (ticket->dropped) {
    throw ClosedError("get: this ticket was dropped.");
  }
  const std::shared_ptr<Flight> flight = ticket->flight;
  if (flight != nullptr && flight->keep != nullptr) {  // line 7, before a poll could release it
    add_use(&flight->uses, stream);
    ++stats_.num_revived;
    return {GotKind::kSource, flight->keep, false};
  }
  settle(releases);
  if (failed_) {
    throw DeviceError("get: an earlier device call failed: " + stats_.last_error +
                      ". The offloaded bytes cannot be brought back.");
  }
  const DeviceScope scope(backend_.get(), stream.device);
  Landing* const landing = ticket->landing.get();
  const bool waits = landing != nullptr && !contains(landing->waited, stream) &&
                     (config_.rules.every_consumer_waits || landing->waited.empty());
  if ((landing == nullptr || waits) && captures(stream, "get")) {
    throw DeviceError(
        "get: the stream is being captured and the tensor is not loaded: reload before capture, "
        "or keep the tensors of captured code.");
  }
  if (landing == nullptr) {  // line 8
    return {GotKind::kNeedsLoad, nullptr, false};
  }
  if (waits) {  // line 9
    try {
      backend_->wait(stream, landing->h2d);
    } catch (const DeviceError& error) {
      fail("get", error);
      throw;
    }
  }
  add_use(&landing->waited, stream);
  return {GotKind::kDestination, landing->keep,
          config_.rules.record_stream_on_destinations};  // line 10
}

bool DeviceEngine::load(const DeviceTicketPtr& ticket, Stream allocated_on, std::uintptr_t dst,
                        KeepAlive keep, Side side, Releases* releases) {
  fork_guard_.check("load");
  const Lock lock(calls_);
  if (ticket->dropped) {
    throw ClosedError("load: this ticket was dropped.");
  }
  if (ticket->landing != nullptr ||
      (ticket->flight != nullptr && ticket->flight->keep != nullptr)) {
    return false;
  }
  settle(releases);
  if (failed_) {
    throw DeviceError("load: an earlier device call failed: " + stats_.last_error +
                      ". The offloaded bytes cannot be brought back.");
  }
  const DeviceScope scope(backend_.get(), ticket->device);
  if (captures(allocated_on, "load")) {
    throw DeviceError("load: the stream is being captured: reload before capture.");
  }
  try {  // line 11
    const Stream in = backend_->side(ticket->device, side);
    if (config_.rules.load_waits_for_allocation) {
      backend_->wait(in, backend_->record(allocated_on));
    }
    if (config_.rules.reload_waits_for_write_out) {
      backend_->wait(in, ticket->last[index(Side::kOut)]);
    }
    backend_->copy_in(in, dst, ticket->slot);
    ticket->last[index(side)] = backend_->record(in);
    ticket->landing = std::make_unique<Landing>(Landing{keep, ticket->last[index(side)], {}});
  } catch (const DeviceError& error) {
    fail("load", error);
    stranded_.push_back({keep, ticket->bytes, nullptr});
    stats_.stranded_bytes += ticket->bytes;
    return true;  // the reference is ours: the next get raises
  }
  stats_.reloaded_bytes += ticket->bytes;
  return true;
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
  // Whoever holds `calls_` may be in the middle of device calls: then the next call buries it.
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

// Lines 12, 13. The flight stays in fly_ until its copy has passed; it counts toward the window.
void DeviceEngine::bury(DeviceTicket* ticket, Releases* releases) {
  --stats_.num_live;
  bury_landing(ticket, releases);
  if (ticket->flight != nullptr && !config_.rules.source_outlives_dropped_ticket) {
    release(ticket->flight.get(), releases);
  }
  ticket->flight = nullptr;
  if (failed_) {
    stranded_slots_.push_back(std::move(ticket->slot));
    stats_.stranded_bytes += ticket->bytes;
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
  const std::unique_ptr<Landing> landing = std::move(ticket->landing);
  if (landing == nullptr) {
    return;
  }
  if (landing->waited.empty() && config_.rules.unread_prefetch_outlives_copy) {
    graveyard_.push_back({landing->keep, ticket->bytes, landing->h2d});
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

// Lines 5 and 13.
void DeviceEngine::settle(Releases* releases) {
  bury_dropped(releases);
  if (failed_) {
    return;
  }
  try {
    for (auto& [device, fly] : fly_) {
      if (fly.flights.empty()) {
        continue;
      }
      const DeviceScope scope(backend_.get(), device);
      while (!fly.flights.empty() && backend_->passed(fly.flights.front()->d2h)) {
        const std::shared_ptr<Flight> oldest = std::move(fly.flights.front());
        fly.flights.pop_front();
        fly.bytes -= oldest->bytes;
        release(oldest.get(), releases);
      }
    }
    for (auto grave = graveyard_.begin(); grave != graveyard_.end();) {
      if (!backend_->passed(grave->last)) {
        ++grave;
        continue;
      }
      stats_.graveyard_bytes -= grave->bytes;
      releases->push_back({grave->keep, {}});
      grave = graveyard_.erase(grave);
    }
    slots_.settle();
  } catch (const DeviceError& error) {
    fail("query", error);
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
  failed_ = true;
  stats_.last_error = std::string(what) + ": " + error.what();
}

DeviceStats DeviceEngine::stats() {
  fork_guard_.check("stats");
  const Lock lock(calls_);
  DeviceStats now = stats_;
  now.inflight_bytes = 0;
  for (const auto& [device, fly] : fly_) {
    now.inflight_bytes += fly.bytes;
  }
  return now;
}

}  // namespace actckpt
