#include "sim/device/backend/allocators.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include "sim/device/backend/devices.h"
#include "sim/device/machine/memory.h"
#include "sim/device/machine/pinned.h"

namespace actckpt::sim_device {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

thread_local int workspace_device = -1;

void* device_bytes(int device, std::size_t bytes) {
  Stream* const home = current_stream(device);
  std::uint64_t capacity = 0;
  std::uint64_t allocated = 0;
  {
    Lock lock = lock_machine();
    const bool is_refused = ++device_memory().num_allocations == device_memory().failing_allocation;
    std::byte* const data = is_refused ? nullptr : device_memory().allocate(lock, home, bytes);
    if (data != nullptr) {
      return data;
    }
    capacity = device_memory().capacity(device);
    allocated = device_memory().figures(device).allocated_bytes.current;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", device, " is out of memory: tried to allocate ", bytes,
                   " bytes; the capacity is ", capacity, " bytes, and ", allocated, " are allocated.");
}

void fill(c10::CachingAllocator::StatArray* stats, const Amount& amount) {
  auto& all = (*stats)[0];
  all.current = static_cast<std::int64_t>(amount.current);
  all.peak = static_cast<std::int64_t>(amount.peak);
  all.allocated = static_cast<std::int64_t>(amount.gained);
  all.freed = static_cast<std::int64_t>(amount.lost);
}

template <typename Function>
void for_amounts(int device, const Function& function) {
  const Lock lock = lock_machine();
  MemoryFigures& figures = device_memory().figures(device);
  for (Amount* amount :
       {&figures.allocated_bytes, &figures.requested_bytes, &figures.reserved_bytes, &figures.blocks}) {
    function(amount);
  }
}

// Methods without `override` are missing in the older versions of torch.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override { return allocate_on(current_device(), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* dst, const void* src, std::size_t bytes) const override { default_copy_data(dst, src, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Lock lock = lock_machine();
    for (int device = 0; device < kNumDevices; ++device) {
      device_memory().empty_cache(lock, device);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const Lock lock = lock_machine();
    device_memory().record_stream(lock, data.get(), of_torch(lock, stream));
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock = lock_machine();
    const MemoryFigures& figures = device_memory().figures(device);
    DeviceStats stats;
    fill(&stats.allocated_bytes, figures.allocated_bytes);
    fill(&stats.active_bytes, figures.allocated_bytes);
    fill(&stats.requested_bytes, figures.requested_bytes);
    fill(&stats.reserved_bytes, figures.reserved_bytes);
    fill(&stats.allocation, figures.blocks);
    fill(&stats.active, figures.blocks);
    stats.num_alloc_retries = static_cast<std::int64_t>(figures.num_retries);
    stats.num_ooms = static_cast<std::int64_t>(figures.num_failures);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_amounts(device, [](Amount* amount) { amount->reset_totals(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_amounts(device, [](Amount* amount) { amount->reset_peak(); });
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) {
    const Lock lock = lock_machine();
    const std::uint64_t capacity = device_memory().capacity(device);
    const std::uint64_t reserved = device_memory().figures(device).reserved_bytes.current;
    return {capacity - std::min(capacity, reserved), capacity};
  }
};

c10::Allocator* cpu_allocator_before = nullptr;

// oneDNN frees by address what it allocated by address, wherever it was.
void free_by_address(void* data) {
  bool is_ours = false;
  {
    const Lock lock = lock_machine();
    is_ours = device_memory().find(range_of(data, 1)) != nullptr;
  }
  is_ours ? free_device_memory(data) : cpu_allocator_before->raw_deleter()(data);
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (workspace_device < 0 || bytes == 0) {
      return cpu_allocator_before->allocate(bytes);
    }
    void* const data = device_bytes(workspace_device, bytes);
    return {data, data, &free_device_memory, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_by_address; }
  void copy_data(void* dst, const void* src, std::size_t bytes) const override { default_copy_data(dst, src, bytes); }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    }
    Lock lock = lock_machine();
    void* const data = pinned_memory().allocate(lock, bytes);
    lock.unlock();
    TORCH_CHECK(data != nullptr, "sim: the system has no ", bytes, " bytes to pin");
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* dst, const void* src, std::size_t bytes) const override { default_copy_data(dst, src, bytes); }
  bool record_event(void* data, void*, c10::Stream stream) override {
    const Lock lock = lock_machine();
    pinned_memory().record_use(lock, data, of_torch(lock, stream));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void free_pinned(void* data) {
    if (data != nullptr) {
      Lock lock = lock_machine();
      pinned_memory().free(lock, data);
    }
  }
};

void replace_cpu_allocator() {
  static const bool is_replaced = [] {
    cpu_allocator_before = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new CpuAllocator(), 1);
    return true;
  }();
  static_cast<void>(is_replaced);
}

DeviceAllocator& own_allocator() {
  static auto* const allocator = new DeviceAllocator();
  return *allocator;
}

PinnedAllocator& own_pinned() {
  static auto* const allocator = new PinnedAllocator();
  return *allocator;
}

}  // namespace

c10::Allocator* device_allocator() { return &own_allocator(); }
c10::Allocator* pinned_allocator() { return &own_pinned(); }

void free_device_memory(void* data) {
  if (data != nullptr) {
    Lock lock = lock_machine();
    device_memory().free(lock, data);
  }
}

c10::DataPtr allocate_on(int device, std::size_t bytes) {
  void* const data = bytes == 0 ? nullptr : device_bytes(device, bytes);
  return {data, data, &free_device_memory, torch_device(device)};
}

void register_allocators() {
  c10::SetAllocator(c10::kPrivateUse1, &own_allocator(), 1);
  at::setHostAllocator(c10::kPrivateUse1, &own_pinned());
}

DeviceWorkspace::DeviceWorkspace(int device) : before_(workspace_device) {
  replace_cpu_allocator();
  workspace_device = device;
}

DeviceWorkspace::~DeviceWorkspace() { workspace_device = before_; }

}  // namespace actckpt::sim_device
