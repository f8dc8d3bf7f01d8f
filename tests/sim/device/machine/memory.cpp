#include "sim/device/machine/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "sim/device/machine/checker.h"

namespace actckpt::sim_device {
namespace {

constexpr std::size_t kGranule = 512;

bool has_passed(const Block& block) {
  return std::all_of(block.fences.begin(), block.fences.end(),
                     [](const Point& fence) { return streams().has_passed(fence); });
}

}  // namespace

DeviceMemory& device_memory() {
  static auto* const memory = new DeviceMemory();
  return *memory;
}

std::byte* DeviceMemory::allocate(Lock& lock, Stream* home, std::size_t requested) {
  const std::size_t bytes = (requested + kGranule - 1) / kGranule * kGranule;
  Device& device = at(home->device);
  settle(lock, &device, false);
  BlockPtr block = take_cached(&device, home, bytes);
  for (const bool waits : {false, true}) {
    if (block == nullptr && device.figures.reserved_bytes.current + bytes > device.capacity) {
      ++device.figures.num_retries;
      settle(lock, &device, waits);
      release_cached(lock, &device);
    }
  }
  block = block != nullptr ? std::move(block) : make(&device, home, bytes);
  if (block == nullptr) {
    ++device.figures.num_failures;
    return nullptr;
  }
  block->requested_bytes = requested;
  device.figures.blocks.add(1);
  device.figures.allocated_bytes.add(bytes);
  device.figures.requested_bytes.add(requested);
  std::byte* const data = block->data;
  hand_out(lock, std::move(block));
  return data;
}

// Writes it, in the order of its stream; a kernel that is running uses its memory at once.
void DeviceMemory::hand_out(const Lock& lock, BlockPtr block) {
  Stream* const home = block->home;
  const Access access = streams().begin(lock, home, "an allocation");
  checker().write(block->range(), access, streams().joined(home->clock, block->fences));
  block->fences.clear();
  if (home->is_run_here() || home->done == home->issued) {
    std::memset(block->data, 0xFF, block->bytes);
  } else {
    Task fill{Task::Kind::kFill};
    fill.dst = block->data;
    fill.bytes = block->bytes;
    streams().issue(lock, home, fill);
  }
  live_.emplace(block->range().begin, std::move(block));
}

// The one that was freed last; a kernel that is running uses it at once, so none that tasks behind it will write.
DeviceMemory::BlockPtr DeviceMemory::take_cached(Device* device, Stream* home, std::size_t bytes) {
  const auto found = device->cached.find({home, bytes});
  if (found == device->cached.end()) {
    return nullptr;
  }
  std::vector<BlockPtr>& blocks = found->second;
  const auto chosen = std::find_if(blocks.rbegin(), blocks.rend(), [&](const BlockPtr& block) {
    return !home->is_run_here() || block->pending <= home->done;
  });
  if (chosen == blocks.rend()) {
    return nullptr;
  }
  BlockPtr block = std::move(*chosen);
  blocks.erase(std::next(chosen).base());
  if (blocks.empty()) {
    device->cached.erase(found);
  }
  return block;
}

DeviceMemory::BlockPtr DeviceMemory::make(Device* device, Stream* home, std::size_t bytes) {
  if (device->figures.reserved_bytes.current + bytes > device->capacity) {
    return nullptr;
  }
  void* const data = std::aligned_alloc(kGranule, bytes);
  if (data == nullptr) {
    return nullptr;
  }
  device->figures.reserved_bytes.add(bytes);
  auto block = std::make_unique<Block>();
  block->data = static_cast<std::byte*>(data);
  block->bytes = bytes;
  block->home = home;
  return block;
}

void DeviceMemory::free(Lock& lock, void* data) {
  const auto found = live_.find(range_of(data, 0).begin);
  if (found == live_.end()) {
    faults().add("unallocated device memory is freed");
    return;
  }
  BlockPtr block = std::move(found->second);
  live_.erase(found);
  Device& device = at(block->home->device);
  device.figures.blocks.subtract(1);
  device.figures.allocated_bytes.subtract(block->bytes);
  device.figures.requested_bytes.subtract(block->requested_bytes);
  block->pending = block->home->is_run_here() ? block->pending : block->home->issued;
  for (Stream* const user : block->users) {
    block->fences.push_back(streams().record(lock, user));
  }
  block->users.clear();
  if (judges_frees) {
    const Access access = streams().begin(lock, block->home, "a free");
    checker().write(block->range(), access, streams().joined(block->home->clock, block->fences));
  }
  auto& place = has_passed(*block) ? device.cached[{block->home, block->bytes}] : device.leaving;
  place.push_back(std::move(block));
}

void DeviceMemory::settle(Lock& lock, Device* device, bool waits) {
  std::vector<BlockPtr> leaving = std::move(device->leaving);
  device->leaving.clear();
  for (BlockPtr& block : leaving) {
    for (std::size_t i = 0; waits && i < block->fences.size(); ++i) {
      streams().force(lock, block->fences[i].stream, block->fences[i].position);
    }
    auto& place = has_passed(*block) ? device->cached[{block->home, block->bytes}] : device->leaving;
    place.push_back(std::move(block));
  }
}

void DeviceMemory::release_cached(const Lock&, Device* device) {
  for (auto& [place, blocks] : device->cached) {
    for (BlockPtr& block : blocks) {
      device->figures.reserved_bytes.subtract(block->bytes);
      return_to_system(std::move(block));
    }
  }
  device->cached.clear();
}

void DeviceMemory::return_to_system(BlockPtr block) {
  std::memset(block->data, 0xFF, block->bytes);
  checker().forget(block->range());
  returning_.push_back(std::move(block));
  if (streams().is_idle()) {
    for (const BlockPtr& past : returning_) {
      std::free(past->data);
    }
    returning_.clear();
  }
}

void DeviceMemory::record_stream(const Lock&, const void* data, Stream* stream) {
  const auto next = live_.upper_bound(range_of(data, 0).begin);
  if (next == live_.begin() || std::prev(next)->second->home == stream) {
    return;
  }
  auto& users = std::prev(next)->second->users;
  if (std::find(users.begin(), users.end(), stream) == users.end()) {
    users.push_back(stream);
  }
}

const Block* DeviceMemory::find(const Range& range) const {
  const auto next = live_.upper_bound(range.begin);
  if (next == live_.begin()) {
    return nullptr;
  }
  const Block& block = *std::prev(next)->second;
  return block.range().contains(range) ? &block : nullptr;
}

std::vector<Block> DeviceMemory::snapshot(int device) const {
  std::vector<Block> blocks;
  for (const auto& [begin, block] : live_) {
    if (block->home->device == device) {
      blocks.push_back(*block);
    }
  }
  return blocks;
}

void DeviceMemory::empty_cache(Lock& lock, int device) {
  settle(lock, &at(device), true);
  release_cached(lock, &at(device));
}

int DeviceMemory::device_of(const void* data) const {
  const Block* const block = find(range_of(data, 1));
  return block == nullptr ? -1 : block->home->device;
}

}  // namespace actckpt::sim_device
