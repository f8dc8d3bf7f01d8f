#include "sim/mock_driver.h"

#include <utility>

#include "engine/memory/extents.h"

namespace actckpt::sim {
namespace {

MockDriver* current = nullptr;

constexpr cuda::Result kInvalidValue = 1;
constexpr cuda::Result kInvalidContext = 201;
constexpr cuda::Result kCaptureUnsupported = 900;
constexpr cuda::Result kCaptureIsolation = 905;
constexpr cuda::Result kOutOfMemory = 2;

std::uint64_t cells(std::size_t bytes) { return round_up(bytes, kCellBytes) / kCellBytes; }

}  // namespace

// The driver's functions.
struct MockCalls {
  static cuda::Result init(unsigned) { return current->fails() ? current->failure_ : 0; }
  static cuda::Result device_get(int* device, int ordinal) {
    *device = ordinal;
    return 0;
  }
  static cuda::Result primary_ctx_retain(void** context, int device) {
    *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(device) + 1);
    return 0;
  }
  static cuda::Result ctx_push(void* context) {
    if (current == nullptr) {
      return cuda::kErrorDeinitialized;  // an engine outlived its machine
    }
    ++current->num_calls_;
    current->stack_.push_back(static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1);
    return 0;
  }
  static cuda::Result ctx_pop(void**) {
    ++current->num_calls_;
    current->stack_.pop_back();
    return 0;
  }
  static cuda::Result stream_create(void** stream, unsigned flags) {
    if (current->fails()) {
      return current->failure_;
    }
    if (flags != cuda::kStreamNonBlocking) {
      current->fault("a side stream that stream 0 serialises");
    }
    const int queue = current->world_->add_queue(current->stack_.back());
    *stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(queue) + 1);
    return 0;
  }
  static cuda::Result stream_wait_event(void* stream, void* event, unsigned) {
    if (current->fails()) {
      return current->failure_;
    }
    const int queue = current->queue_of(stream);
    if (current->capturing_[queue]) {
      return kCaptureIsolation;
    }
    const int recorded = static_cast<MockDriver::Event*>(event)->recorded;
    if (recorded >= 0) {
      current->world_->wait(queue, recorded);
    }
    return 0;
  }
  static cuda::Result stream_is_capturing(void* stream, int* status) {
    if (current->fails()) {
      return current->failure_;
    }
    if (stream == nullptr && current->any_capturing() && !current->capturing_[current->queue_of(stream)]) {
      return cuda::kErrorCaptureImplicit;
    }
    *status = current->capturing_[current->queue_of(stream)] ? 1 : 0;
    return 0;
  }
  static cuda::Result exchange_capture_mode(int* mode) {
    ++current->num_calls_;
    std::swap(*mode, current->capture_mode_);
    return 0;
  }
  static cuda::Result event_create(void** event, unsigned flags) {
    if (current->fails()) {
      return current->failure_;
    }
    if (flags != cuda::kEventDisableTiming && flags != cuda::kEventDefault) {
      current->fault("an event with flags of no use");
    }
    current->events_.push_back(std::make_unique<MockDriver::Event>());
    current->events_.back()->device = current->stack_.back();
    current->events_.back()->is_timed = flags == cuda::kEventDefault;
    *event = current->events_.back().get();
    return 0;
  }
  static cuda::Result event_record(void* event, void* stream) {
    if (current->fails()) {
      return current->failure_;
    }
    auto* const own = static_cast<MockDriver::Event*>(event);
    const int queue = current->queue_of(stream);
    if (own->device != current->world_->device_of(queue)) {
      return kInvalidContext;
    }
    own->recorded = current->world_->record(queue);
    return 0;
  }
  static cuda::Result event_query(void* event) {
    if (current->fails()) {
      return current->failure_;
    }
    if (current->any_capturing() && current->capture_mode_ != cuda::kCaptureModeRelaxed) {
      return kCaptureUnsupported;
    }
    if (current->stack_.empty()) {
      return kInvalidContext;
    }
    const int recorded = static_cast<MockDriver::Event*>(event)->recorded;
    return recorded < 0 || current->world_->passed(recorded) ? 0 : cuda::kErrorNotReady;
  }
  // One operation of the machine takes a millisecond.
  static cuda::Result event_elapsed(float* milliseconds, void* first, void* second) {
    if (current->fails()) {
      return current->failure_;
    }
    const auto* const begin = static_cast<MockDriver::Event*>(first);
    const auto* const end = static_cast<MockDriver::Event*>(second);
    if (!begin->is_timed || !end->is_timed || begin->recorded < 0 || end->recorded < 0) {
      current->fault("the time of an event without timing");
      return kInvalidContext;
    }
    *milliseconds =
        static_cast<float>(current->world_->time_of(end->recorded) - current->world_->time_of(begin->recorded));
    return 0;
  }
  static cuda::Result copy_to_host(void* dst, unsigned long long src, std::size_t bytes, void* stream) {
    return copy(reinterpret_cast<std::uintptr_t>(dst), {src, cells(bytes)}, bytes, stream, true);
  }
  static cuda::Result copy_to_device(unsigned long long dst, const void* src, std::size_t bytes, void* stream) {
    return copy(reinterpret_cast<std::uintptr_t>(src), {dst, cells(bytes)}, bytes, stream, false);
  }
  static cuda::Result copy(std::uintptr_t host, Span device, std::size_t bytes, void* stream, bool out) {
    const bool failed = current->fails();
    if (!current->is_pinned(host, bytes)) {
      current->fault("a copy of pageable memory, or across slabs");
    }
    const int queue = current->queue_of(stream);
    const Span pages{host, cells(bytes)};
    current->world_->copy(queue, out ? pages : device, out ? device : pages, out ? "write-out" : "reload");
    return failed ? current->failure_ : 0;  // a failed call may have begun the copy
  }
  static cuda::Result host_register(void* ptr, std::size_t bytes, unsigned flags) {
    if (current->fails()) {
      return current->failure_;
    }
    if (current->refuse_pins_) {
      return kOutOfMemory;
    }
    if (flags != cuda::kHostRegisterPortable) {
      current->fault("memory pinned for one context only");
    }
    current->pinned_[reinterpret_cast<std::uintptr_t>(ptr)] = bytes;
    return 0;
  }
  static cuda::Result host_unregister(void* ptr) {
    ++current->num_calls_;
    if (!current->may_wait_()) {
      current->fault("memory is unpinned, which waits, in a thread that others wait for");
    }
    current->pinned_.erase(reinterpret_cast<std::uintptr_t>(ptr));
    return 0;
  }
  static cuda::Result device_attribute(int* value, int attribute, int) {
    if (attribute != cuda::kAttributeHostNumaId) {
      current->fault("an attribute of no use");
    }
    *value = current->node_;
    return 0;
  }
  static cuda::Result error_name(cuda::Result code, const char** name) {
    *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_THE_MOCK";
    return 0;
  }
};

MockDriver::MockDriver(World* world, std::vector<int> default_queues)
    : world_(world), default_queues_(std::move(default_queues)) {
  current = this;
}

MockDriver::~MockDriver() {
  if (current == this) {
    current = nullptr;
  }
}

const cuda::Driver* MockDriver::table() const {
  static const cuda::Driver driver = [] {
    cuda::Driver d;
    d.init = &MockCalls::init;
    d.device_get = &MockCalls::device_get;
    d.primary_ctx_retain = &MockCalls::primary_ctx_retain;
    d.ctx_push = &MockCalls::ctx_push;
    d.ctx_pop = &MockCalls::ctx_pop;
    d.stream_create = &MockCalls::stream_create;
    d.stream_wait_event = &MockCalls::stream_wait_event;
    d.stream_is_capturing = &MockCalls::stream_is_capturing;
    d.exchange_capture_mode = &MockCalls::exchange_capture_mode;
    d.event_create = &MockCalls::event_create;
    d.event_record = &MockCalls::event_record;
    d.event_query = &MockCalls::event_query;
    d.event_elapsed = &MockCalls::event_elapsed;
    d.copy_to_host = &MockCalls::copy_to_host;
    d.copy_to_device = &MockCalls::copy_to_device;
    d.host_register = &MockCalls::host_register;
    d.host_unregister = &MockCalls::host_unregister;
    d.error_name = &MockCalls::error_name;
    d.device_attribute = &MockCalls::device_attribute;
    return d;
  }();
  return &driver;
}

void MockDriver::fail_at(std::uint64_t n, cuda::Result code) {
  fail_at_ = num_calls_ + n;
  failure_ = code;
}

bool MockDriver::fails() { return ++num_calls_ > fail_at_; }

void MockDriver::fault(const std::string& what) { faults_.push_back(what); }

int MockDriver::queue_of(cuda::StreamHandle stream) {
  if (stream != nullptr) {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(stream)) - 1;
  }
  if (stack_.empty()) {
    fault("stream 0 without a context");
    return default_queues_.front();
  }
  return default_queues_[static_cast<std::size_t>(stack_.back())];
}

bool MockDriver::any_capturing() const {
  for (const auto& [queue, capturing] : capturing_) {
    if (capturing) {
      return true;
    }
  }
  return false;
}

bool MockDriver::is_pinned(std::uintptr_t ptr, std::size_t bytes) const {
  const auto after = pinned_.upper_bound(ptr);
  if (after == pinned_.begin()) {
    return false;
  }
  const auto found = std::prev(after);
  return ptr + bytes <= found->first + found->second;
}

std::uint64_t MockDriver::num_pinned_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [ptr, size] : pinned_) {
    bytes += size;
  }
  return bytes;
}

}  // namespace actckpt::sim
