// Device memory: a caching allocator with the semantics of torch's for CUDA.
//
// Contract: a block belongs to the stream it was allocated on. Freed, it is handed out again at once, to whoever asks
// for as many bytes on that stream; not before what `record_stream` named has passed. What is handed out is poisoned,
// in the stream's order. Sizes are multiples of 512 bytes; blocks are never split. Beyond the capacity cached blocks go
// back to the system; if that is not enough, `allocate` gives null.
//  - To hand out a block is to write it: a use that neither the stream, nor the host, nor `record_stream` orders before
//    is a fault. With `judges_frees` it is one already when the block is freed, also if nobody gets it; a program that
//    makes the stream wait before it allocates again is right then in fact, and judged wrong.
// Thread rule: under the machine's lock. Ownership: of all device memory.

#pragma once

#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "sim/device/machine/streams.h"

namespace actckpt::sim_device {

struct Amount {
  std::uint64_t current = 0;
  std::uint64_t peak = 0;
  std::uint64_t gained = 0;  // all that was ever added, and taken away
  std::uint64_t lost = 0;

  void add(std::uint64_t amount) {
    current += amount;
    gained += amount;
    peak = current > peak ? current : peak;
  }
  void subtract(std::uint64_t amount) {
    current -= amount;
    lost += amount;
  }
  void reset_peak() { peak = current; }
  void reset_totals() { gained = lost = 0; }
};

struct MemoryFigures {
  Amount allocated_bytes;
  Amount requested_bytes;
  Amount reserved_bytes;
  Amount blocks;
  std::uint64_t num_retries = 0;
  std::uint64_t num_failures = 0;
};

struct Block {
  std::byte* data;
  std::size_t bytes;
  std::size_t requested_bytes;
  Stream* home;
  std::vector<Stream*> users;  // other streams, by record_stream
  std::vector<Point> fences;   // once freed: up to where they used it
  // Once freed while a kernel of another thread ran: the tasks of its home that may still write it.
  std::uint64_t pending = 0;

  Range range() const { return range_of(data, bytes); }
};

class DeviceMemory {
 public:
  std::byte* allocate(Lock& lock, Stream* home, std::size_t bytes);
  void free(Lock& lock, void* data);
  void record_stream(const Lock& lock, const void* data, Stream* stream);

  // The live block around the range; null: not all of it is one's.
  const Block* find(const Range& range) const;
  std::vector<Block> snapshot(int device) const;
  // The device of the live block around `data`; -1: there is none.
  int device_of(const void* data) const;

  void empty_cache(Lock& lock, int device);
  MemoryFigures& figures(int device) { return at(device).figures; }
  std::uint64_t capacity(int device) { return at(device).capacity; }
  void set_capacity(int device, std::uint64_t bytes) { at(device).capacity = bytes; }
  bool judges_frees = false;
  // Allocations of both devices so far, and the number of the one that fails; 0: none.
  std::uint64_t num_allocations = 0;
  std::uint64_t failing_allocation = 0;

 private:
  using BlockPtr = std::unique_ptr<Block>;
  struct Device {
    std::uint64_t capacity = std::uint64_t{4} << 30;
    std::map<std::pair<Stream*, std::size_t>, std::vector<BlockPtr>> cached;
    std::vector<BlockPtr> leaving;  // freed, and used by others
    MemoryFigures figures;
  };

  Device& at(int device) { return devices_[static_cast<std::size_t>(device)]; }
  BlockPtr take_cached(Device* device, Stream* home, std::size_t bytes);
  BlockPtr make(Device* device, Stream* home, std::size_t bytes);
  void settle(Lock& lock, Device* device, bool waits);
  void hand_out(const Lock& lock, BlockPtr block);
  void release_cached(const Lock& lock, Device* device);
  void return_to_system(BlockPtr block);

  std::array<Device, kNumDevices> devices_;
  std::map<std::uintptr_t, BlockPtr> live_;  // by where they begin
  std::vector<BlockPtr> returning_;          // queued work of a wrong program may still name them
};

DeviceMemory& device_memory();

}  // namespace actckpt::sim_device
