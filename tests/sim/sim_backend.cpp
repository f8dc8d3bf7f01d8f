#include "sim/sim_backend.h"

#include <memory>

#include "engine/errors.h"
#include "engine/memory/extents.h"

namespace actckpt::sim {
namespace {

struct SimEvent : Event {
  explicit SimEvent(int i) : id(i) {}
  const int id;
};

int id_of(const EventPtr& event) { return static_cast<const SimEvent&>(*event).id; }

Span span_of(const Segment& segment) {
  return {reinterpret_cast<std::uintptr_t>(segment.ptr), round_up(segment.bytes, kCellBytes) / kCellBytes};
}

}  // namespace

SimBackend::SimBackend(World* world, std::vector<int> default_queues)
    : world_(world), default_queues_(std::move(default_queues)) {}

void SimBackend::enter(int device) { entered_.push_back(device); }

void SimBackend::leave(int) noexcept { entered_.pop_back(); }

int SimBackend::queue_of(Stream stream) const {
  if (entered_.empty() || (stream.handle == 0 && entered_.back() != stream.device)) {
    throw DeviceError("sim: a device call for device " + std::to_string(stream.device) + " without its context.");
  }
  return stream.handle == 0 ? default_queues_[static_cast<std::size_t>(stream.device)]
                            : static_cast<int>(stream.handle) - 1;
}

Stream SimBackend::side(int device, Side side) {
  const auto found = sides_.find({device, side});
  if (found != sides_.end()) {
    return found->second;
  }
  const Stream stream{device, static_cast<std::uintptr_t>(world_->add_queue(device)) + 1};
  sides_.emplace(std::make_pair(device, side), stream);
  return stream;
}

bool SimBackend::capturing(Stream stream) {
  queue_of(stream);
  return false;
}

EventPtr SimBackend::record(Stream stream) { return std::make_shared<SimEvent>(world_->record(queue_of(stream))); }

void SimBackend::wait(Stream stream, const EventPtr& event) { world_->wait(queue_of(stream), id_of(event)); }

bool SimBackend::passed(const EventPtr& event) { return world_->passed(id_of(event)); }

void SimBackend::copy_out(Stream stream, const Segment& host, std::uintptr_t src) {
  const Span span = span_of(host);
  world_->copy(queue_of(stream), span, {src, span.num_cells}, "write-out");
}

void SimBackend::copy_in(Stream stream, std::uintptr_t dst, const Segment& host) {
  const Span span = span_of(host);
  world_->copy(queue_of(stream), {dst, span.num_cells}, span, "reload");
}

}  // namespace actckpt::sim
