#include "engine/protocol/device_engine.h"

#include <algorithm>
#include <utility>

#include "engine/errors.h"
#include "engine/protocol/uses.h"

namespace actckpt {
namespace {

constexpr std::uint64_t kWakeBytes = 256 << 10;

}  // namespace

DeviceEngine::DeviceEngine(std::shared_ptr<Backend> backend, std::shared_ptr<Pool> pool, const DeviceConfig& config,
                           Below below, Pause pause)
    : backend_(std::move(backend)),
      config_(config),
      pause_(std::move(pause)),
      wake_(std::move(below.wake)),
      help_(std::move(below.help)),
      slots_(std::move(pool), backend_.get(), config.rules),
      spills_(backend_.get(), config.spill, config.rules, std::move(below.tier), below.registrar),
      window_(config.window_bytes) {}

Put DeviceEngine::put(std::uintptr_t src, std::uint64_t bytes, Stream stream, KeepAlive keep, bool must,
                      Releases* releases) {
  fork_guard_.check("put");
  Lock lock(calls_);
  const std::optional<DeviceScope> scope = entered(stream.device);
  settle(releases);
  if (failed_) {
    ++stats_.num_kept_failed;
    return {PutOutcome::kKeptFailed, nullptr};
  }
  auto ticket = std::make_shared<DeviceTicket>();
  ticket->device = stream.device;
  ticket->bytes = bytes;
  ticket->put_stream = stream;
  try {
    return begin_put(lock, src, ticket, keep, must, releases);
  } catch (const DeviceError& error) {
    fail("put", error);
    ++stats_.num_kept_failed;
    stranded_.push_back({keep, bytes, stream, nullptr});
    stranded_slots_.push_back(std::move(ticket->slot));
    stranded_pieces_.push_back(std::move(ticket->pieces));
    stats_.stranded_bytes += bytes;
    return {PutOutcome::kKeptStranded, nullptr, true};
  }
}

Put DeviceEngine::begin_put(Lock& lock, std::uintptr_t src, const DeviceTicketPtr& ticket, KeepAlive keep, bool must,
                            Releases* releases) {
  const Stream stream = ticket->put_stream;
  if (backend_->capturing(stream)) {  // line 1
    ++stats_.num_kept_capturing;
    return {PutOutcome::kKeptCapturing, nullptr};
  }
  if (!must && lags(ticket->device, ticket->bytes)) {
    ++stats_.num_kept_behind;
    return {PutOutcome::kKeptBehind, nullptr};
  }
  Fences fences;
  std::optional<Block> slot = slots_.take(ticket->bytes, &fences);  // line 3
  ticket->flight = std::make_shared<Flight>(Flight{keep, ticket->bytes, backend_->record(stream), nullptr, {stream}});
  PutOutcome outcome = PutOutcome::kTaken;
  if (slot.has_value()) {
    ticket->slot = std::move(*slot);
    write_out(ticket.get(), src, fences);
  } else {
    outcome = put_below(lock, src, ticket.get(), must);
  }
  if (ticket->flight->d2h == nullptr) {
    return {outcome, nullptr};
  }
  Fly& fly = fly_[ticket->device];
  fly.flights.push_back(ticket->flight);
  fly.flight_bytes += ticket->bytes;
  stats_.peak_inflight_bytes = std::max(stats_.peak_inflight_bytes, fly.bytes());
  if (outcome != PutOutcome::kTaken) {
    return {outcome, nullptr, true};  // some pieces are being copied already
  }
  launch(ticket);
  shrink_window(stream, releases);
  return {PutOutcome::kTaken, ticket, true};
}

void DeviceEngine::launch(const DeviceTicketPtr& ticket) {
  ++stats_.num_puts;
  ++stats_.num_live;
  window_.add(ticket->bytes);
  stats_.offloaded_bytes += ticket->bytes;
  ticket->is_below = !ticket->pieces.empty();
  if (ticket->is_below) {
    ++stats_.num_tier_puts;
    stats_.tier_bytes += ticket->bytes;
    stats_.peak_tier_bytes = std::max(stats_.peak_tier_bytes, stats_.tier_bytes);
  }
}

// Line 4.
void DeviceEngine::write_out(DeviceTicket* ticket, std::uintptr_t src, const Fences& fences) {
  const Stream out = backend_->side(ticket->device, Side::kOut);
  if (config_.rules.write_out_waits_for_stream) {
    backend_->wait(out, ticket->flight->ready);
  }
  if (config_.rules.slot_owner_waits) {
    for (const EventPtr& fence : fences) {
      backend_->wait(out, fence);
    }
  }
  for (const Segment& segment : ticket->slot.segments()) {
    backend_->copy_out(out, segment, src);
    src += segment.bytes;
  }
  ticket->flight->d2h = backend_->record(out);
  ticket->last[index(Side::kOut)] = ticket->flight->d2h;
}

// Line 16: below pinned memory, piece by piece.
PutOutcome DeviceEngine::put_below(Lock& lock, std::uintptr_t src, DeviceTicket* ticket, bool must) {
  if (spills_.is_ready()) {
    ticket->pieces = spills_.cut(ticket->bytes);
  }
  if (ticket->pieces.empty()) {
    ++stats_.num_kept_full;
    return PutOutcome::kKeptFull;
  }
  if (!must && spills_.num_free_buffers() < ticket->pieces.size()) {
    ticket->pieces.clear();
    wake();
    ++stats_.num_kept_busy;
    return PutOutcome::kKeptBusy;
  }
  if (write_pieces(lock, src, ticket, must)) {
    return PutOutcome::kTaken;
  }
  spills_.drop(&ticket->pieces);
  ++stats_.num_kept_full;
  return PutOutcome::kKeptFull;
}

// False if every buffer is stuck: then waiting is useless.
bool DeviceEngine::write_pieces(Lock& lock, std::uintptr_t src, DeviceTicket* ticket, bool must) {
  const Stream out = backend_->side(ticket->device, Side::kOut);
  if (config_.rules.write_out_waits_for_stream) {
    backend_->wait(out, ticket->flight->ready);
  }
  const Stopwatch watch;
  bool has_waited = false;
  for (const PiecePtr& piece : ticket->pieces) {
    while (!spills_.write_out(piece, out, src)) {
      if (!spills_.is_writing()) {
        return false;
      }
      if (!std::exchange(has_waited, true)) {
        ++stats_.num_host_waits;
        wake_for(0);
      }
      pause(lock);
      spills_.advance();
    }
    ticket->flight->d2h = piece->d2h;
  }
  if (backend_->is_synchronous()) {
    spills_.advance();
  }
  unwoken_bytes_ += ticket->bytes;
  wake_for(must ? unwoken_bytes_ : kWakeBytes);
  if (has_waited) {
    const double seconds = watch.seconds();
    stats_.host_wait_seconds += seconds;
    stats_.stall_seconds += seconds;
  }
  return true;
}

void DeviceEngine::wake() {
  unwoken_bytes_ = 0;
  if (wake_ != nullptr) {
    wake_();
  }
}

// To wake a worker takes longer than to copy a few pages, which a caller that waits does itself. Only workers notice
// that a device has copied.
void DeviceEngine::wake_for(std::uint64_t bytes) {
  if (bytes >= kWakeBytes || spills_.is_copying()) {
    wake();
  }
}

// Calls of other threads may run meanwhile.
void DeviceEngine::pause(Lock& lock) {
  if (pause_ != nullptr) {
    pause_(lock);
  } else {
    lock.unlock();
    const bool has_helped = help_ != nullptr && help_();
    lock.lock();
    if (!has_helped) {
      moved_.wait_for(lock, std::chrono::microseconds(200));
    }
  }
  check_working("wait");
}

bool DeviceEngine::use(const DeviceTicketPtr& ticket, Stream stream) {
  fork_guard_.check("use");
  const Lock lock(calls_);
  if (ticket->flight == nullptr || ticket->flight->keep == nullptr) {
    return false;
  }
  if (config_.rules.later_saves_are_uses) {
    add_use(&ticket->flight->uses, stream);
  }
  return true;
}

Got DeviceEngine::get(const DeviceTicketPtr& ticket, Stream stream, Releases* releases) {
  fork_guard_.check("get");
  const Lock lock(calls_);
  if (ticket->dropped) {
    throw OffloadError("get: this ticket was dropped.");
  }
  const std::shared_ptr<Flight> flight = ticket->flight;
  if (flight != nullptr && flight->keep != nullptr) {  // line 7, before a poll could release it
    add_use(&flight->uses, stream);
    ++stats_.num_revived;
    return {GotKind::kSource, flight->keep, false};
  }
  const std::optional<DeviceScope> scope = entered(stream.device);
  settle(releases);  // also before a load: what it allocates may fit where a source was
  check_working("get");
  return get_landing(ticket.get(), stream, releases);
}

Got DeviceEngine::get_landing(DeviceTicket* ticket, Stream stream, Releases* releases) {
  Landing* const landing = ticket->landing.get();
  const bool is_there = landing != nullptr && landing->num_missing == 0;
  const bool waits =
      is_there && !contains(landing->waited, stream) && (config_.rules.every_consumer_waits || landing->waited.empty());
  if ((!is_there || waits) && captures(stream, "get")) {
    throw DeviceError(
        "get: the stream is being captured and the tensor is not loaded: reload before capture, "
        "or keep the tensors of captured code.");
  }
  if (landing == nullptr) {  // line 8
    return {GotKind::kNeedsLoad, nullptr, false};
  }
  if (landing->error) {
    const std::string message = landing->error.message;
    bury_landing(ticket, releases);
    throw OffloadReadError(message);
  }
  if (!is_there) {
    spills_.hurry(landing);
    return {GotKind::kBusy, nullptr, false};
  }
  stats_.num_prefetched += landing->is_prefetch && landing->waited.empty() ? 1 : 0;
  if (waits) {  // line 9
    try {
      waits_.wait(backend_.get(), stream, landing->h2d);
    } catch (const DeviceError& error) {
      fail("get", error);
      throw;
    }
  }
  add_use(&landing->waited, stream);
  const bool is_away = !(stream == landing->home);  // at home the allocator orders the next owner
  return {GotKind::kDestination, landing->keep, is_away && config_.rules.record_stream_on_destinations};  // line 10
}

void DeviceEngine::wait(const DeviceTicketPtr& ticket) {
  fork_guard_.check("get");
  Lock lock(calls_);
  const Stopwatch watch;
  try {
    const LandingPtr landing = ticket->landing;
    while (landing != nullptr && landing == ticket->landing && landing->num_missing > 0 && !landing->error &&
           !failed_) {
      pause(lock);
      spills_.advance();
    }
    if (landing != nullptr) {
      landing->is_prefetch = false;  // requested before it was there
    }
  } catch (const DeviceError& error) {
    fail("get", error);
  }
  const double seconds = watch.seconds();
  stats_.stall_seconds += seconds;
  stats_.num_late += seconds >= kLateSeconds ? 1 : 0;
}

bool DeviceEngine::load(const DeviceTicketPtr& ticket, Stream allocated_on, std::uintptr_t dst, KeepAlive keep,
                        Side side, Releases* releases) {
  fork_guard_.check("load");
  const Lock lock(calls_);
  if (ticket->dropped) {
    throw OffloadError("load: this ticket was dropped.");
  }
  if (ticket->landing != nullptr || (ticket->flight != nullptr && ticket->flight->keep != nullptr)) {
    return false;
  }
  const std::optional<DeviceScope> scope = entered(ticket->device);
  settle(releases);
  check_working("load");
  if (captures(allocated_on, "load")) {
    throw DeviceError("load: the stream is being captured: reload before capture.");
  }
  auto landing = std::make_shared<Landing>();
  landing->keep = keep;
  landing->home = allocated_on;
  landing->is_prefetch = side == Side::kIn;
  try {
    begin_load(ticket.get(), landing, dst, side);
  } catch (const DeviceError& error) {
    fail("load", error);
    landing->is_abandoned = true;
    stranded_.push_back({keep, ticket->bytes, allocated_on, nullptr});
    stats_.stranded_bytes += ticket->bytes;
    return true;  // the reference is ours: the next get raises
  }
  ticket->landing = std::move(landing);
  stats_.reloaded_bytes += ticket->bytes;
  return true;
}

// Line 11, and for pieces line 18.
void DeviceEngine::begin_load(DeviceTicket* ticket, const LandingPtr& landing, std::uintptr_t dst, Side side) {
  landing->in = backend_->side(ticket->device, side);
  if (config_.rules.load_waits_for_allocation) {
    backend_->wait(landing->in, backend_->record(landing->home));
  }
  if (!ticket->pieces.empty()) {
    spills_.load(ticket->pieces, landing, dst, side == Side::kUrgent);
    spills_.advance();
    wake_for(side == Side::kUrgent ? ticket->bytes : kWakeBytes);
    return;
  }
  if (config_.rules.reload_waits_for_write_out) {
    backend_->wait(landing->in, ticket->last[index(Side::kOut)]);
  }
  for (const Segment& segment : ticket->slot.segments()) {
    backend_->copy_in(landing->in, dst, segment);
    dst += segment.bytes;
  }
  landing->h2d = backend_->record(landing->in);
  ticket->last[index(side)] = landing->h2d;
}

}  // namespace actckpt
