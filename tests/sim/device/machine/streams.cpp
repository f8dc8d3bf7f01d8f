#include "sim/device/machine/streams.h"

#include <algorithm>
#include <cstring>

#include "sim/device/machine/checker.h"
#include "sim/device/machine/pinned.h"

namespace actckpt::sim_device {
namespace {

constexpr int kPoolSize = 32;  // as torch's pool of CUDA streams
constexpr std::int64_t kFirstCreated = 1000;
constexpr double kQuerySeconds = 1e-6;

thread_local int device_here = 0;
thread_local std::array<Stream*, kNumDevices> stream_here{};

void run(const Task& task) {
  if (task.kind == Task::Kind::kFill) {
    std::memset(task.dst, 0xFF, task.bytes);
    return;
  }
  const OpenedPages opened(range_of(task.dst, task.bytes), range_of(task.src, task.bytes));
  std::memcpy(task.dst, task.src, task.bytes);
}

}  // namespace

Streams& streams() {
  static auto* const all = new Streams();
  return *all;
}

Streams::Streams() {
  for (int device = 0; device < kNumDevices; ++device) {
    for (int id = 0; id <= kPoolSize; ++id) {
      add(device, id);
    }
  }
}

Stream* Streams::add(int device, std::int64_t id) {
  all_.push_back(std::make_unique<Stream>());
  all_.back()->device = device;
  all_.back()->id = id;
  return all_.back().get();
}

Stream* Streams::find(int device, std::int64_t id) const {
  for (const auto& stream : all_) {
    if (stream->device == device && stream->id == id) {
      return stream.get();
    }
  }
  return nullptr;
}

bool Streams::knows(const Stream* stream) const {
  return std::any_of(all_.begin(), all_.end(), [&](const auto& own) { return own.get() == stream; });
}

std::vector<std::int64_t> Streams::ids(int device) const {
  std::vector<std::int64_t> found;
  for (const auto& stream : all_) {
    if (stream->device == device) {
      found.push_back(stream->id);
    }
  }
  return found;
}

Stream* Streams::pooled(int device) {
  int& next = next_pooled_[static_cast<std::size_t>(device)];
  return find(device, 1 + next++ % kPoolSize);
}

Stream* Streams::create(int device) { return add(device, kFirstCreated + static_cast<std::int64_t>(all_.size())); }

void Streams::issue(const Lock&, Stream* stream, const Task& task) {
  stream->tasks.push_back(task);
  ++stream->issued;
}

void Streams::step(Lock& lock, Stream* stream) {
  const Task task = stream->tasks.front();
  stream->tasks.pop_front();
  stream->depth = 1;
  stream->runner = std::this_thread::get_id();
  if (task.kind == Task::Kind::kWait) {
    force(lock, task.other, task.position);
  } else {
    run(task);
  }
  stream->depth = 0;
  ++stream->done;
  changed_.notify_all();
}

void Streams::force(Lock& lock, Stream* stream, std::uint64_t position) {
  while (stream->done < position) {
    if (stream->is_run_here()) {
      return;  // from inside of its own kernel
    }
    if (stream->depth > 0) {
      changed_.wait(lock);
    } else {
      step(lock, stream);
    }
  }
}

void Streams::force_all(Lock& lock) {
  for (std::size_t i = 0; i < all_.size(); ++i) {  // others may add streams meanwhile
    force(lock, all_[i].get(), all_[i]->issued);
  }
}

bool Streams::is_idle() const {
  return std::all_of(all_.begin(), all_.end(), [](const auto& stream) { return stream->tasks.empty(); });
}

bool Streams::is_any_capturing() const {
  return std::any_of(all_.begin(), all_.end(), [](const auto& stream) { return stream->is_capturing; });
}

std::uint64_t Streams::num_pending(int device) const {
  std::uint64_t sum = 0;
  for (const auto& stream : all_) {
    sum += stream->device == device ? stream->tasks.size() : 0;
  }
  return sum;
}

Access Streams::begin(const Lock&, Stream* stream, const char* what) {
  if (stream->queue < 0) {
    stream->queue = num_queues_++;
  }
  stream->clock.join(host_);
  stream->last_tick = stream->clock.advance(stream->queue);
  return {stream->queue, stream->last_tick, what, stream};
}

Point Streams::record(const Lock&, Stream* stream) {
  stream->clock.join(host_);
  return {stream, stream->issued, stream->clock, stream->last_tick, epoch_, now(stream)};
}

Clock Streams::joined(Clock clock, const std::vector<Point>& points) const {
  for (const Point& point : points) {
    if (point.epoch == epoch_) {
      clock.join(point.clock);
    }
  }
  return clock;
}

void Streams::wait(const Lock& lock, Stream* stream, const Point& point) {
  if (point.stream == nullptr) {
    return;
  }
  if (point.epoch == epoch_) {
    stream->clock.join(point.clock);
    stream->time_s = std::max(now(stream), point.time_s);
  }
  if (point.stream != stream && !has_passed(point)) {
    Task task{Task::Kind::kWait};
    task.other = point.stream;
    task.position = point.position;
    issue(lock, stream, task);
  }
}

void Streams::know(const Point& point) {
  if (point.stream != nullptr && point.epoch == epoch_) {
    host_.join(point.clock);
    host_time_s_ = std::max(host_time_s_, point.time_s);
    pinned_memory().host_knows(host_);
  }
}

bool Streams::is_known(const Point& point) const {
  return point.stream == nullptr || point.epoch != epoch_ || host_.covers(point.stream->queue, point.tick);
}

// Work that runs at launch may be said not to have ended: a device might be slower.
bool Streams::query(Lock& lock, const Point& point) {
  if (kernel_bytes_per_s > 0.0 && point.epoch == epoch_ && point.time_s > std::max(host_time_s_, kernels_time_s_)) {
    host_time_s_ += kQuerySeconds;
    return false;
  }
  const bool is_reluctant = adversary_.is_reluctant();
  if (has_passed(point) && (is_known(point) || !is_reluctant)) {
    know(point);
    return true;
  }
  if (!has_passed(point) && !is_reluctant) {
    move_on(lock, point.stream);
  }
  return false;
}

void Streams::synchronize(Lock& lock, const Point& point) {
  if (point.stream != nullptr) {
    force(lock, point.stream, point.position);
    know(point);
  }
}

// One step of it, or of the stream that it waits for.
void Streams::move_on(Lock& lock, Stream* stream) {
  while (stream->depth == 0 && !stream->tasks.empty()) {
    const Task& next = stream->tasks.front();
    if (next.kind != Task::Kind::kWait || next.other->done >= next.position) {
      step(lock, stream);
      return;
    }
    stream = next.other;
  }
}

void Streams::meddle(Lock& lock) {
  while (adversary_.chance(adversary_.eagerness)) {
    std::vector<Stream*> busy;
    for (const auto& stream : all_) {
      if (!stream->tasks.empty()) {
        busy.push_back(stream.get());
      }
    }
    if (busy.empty()) {
      return;
    }
    move_on(lock, busy[adversary_.random() % busy.size()]);
  }
}

void Streams::set_adversary(std::uint64_t seed, double eagerness, double reluctance, bool is_for_caller) {
  adversary_.random.seed(seed);
  adversary_.eagerness = eagerness;
  adversary_.reluctance = reluctance;
  adversary_.asker = is_for_caller ? std::this_thread::get_id() : std::thread::id{};
}

void Streams::settle(Lock& lock) {
  force_all(lock);
  for (const auto& stream : all_) {
    know(record(lock, stream.get()));
  }
  ++epoch_;
  num_queues_ = 0;
  host_ = Clock();
  for (const auto& stream : all_) {
    stream->queue = -1;
    stream->last_tick = 0;
    stream->clock = Clock();
  }
  checker().clear();
}

void Streams::take_link(const Lock&, Stream* stream, Direction direction, std::size_t bytes) {
  const double bytes_per_s = link_bytes_per_s[static_cast<std::size_t>(direction)];
  if (bytes_per_s <= 0.0) {
    return;
  }
  double& free_s = link_free_s_[static_cast<std::size_t>(stream->device)][static_cast<std::size_t>(direction)];
  free_s = std::max(now(stream), free_s) + static_cast<double>(bytes) / bytes_per_s;
  stream->time_s = free_s;
}

KernelScope::KernelScope(Stream* stream) : stream_(stream) {
  Lock lock = lock_machine();
  if (!stream->is_run_here()) {
    streams().meddle(lock);
    while (stream->done < stream->issued) {
      streams().force(lock, stream, stream->issued);
    }
    ++stream->issued;
    stream->runner = std::this_thread::get_id();
  }
  ++stream->depth;
}

KernelScope::~KernelScope() noexcept {
  const Lock lock = lock_machine();
  if (--stream_->depth == 0) {
    ++stream_->done;
    streams().changed_.notify_all();
  }
}

int current_device() { return device_here; }

void set_current_device(int device) { device_here = device; }

Stream* current_stream(int device) {
  Stream*& stream = stream_here[static_cast<std::size_t>(device)];
  if (stream == nullptr) {
    const Lock lock = lock_machine();
    stream = streams().find(device, 0);
  }
  return stream;
}

void set_current_stream(Stream* stream) { stream_here[static_cast<std::size_t>(stream->device)] = stream; }

}  // namespace actckpt::sim_device
