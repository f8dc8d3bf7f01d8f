// Host memory that holds the bytes of CPU tensors until they are written.
//
// Contract: large buffers are mappings of their own, which are used again: touching new pages takes longer than
// copying into them. What is mapped never exceeds the most that was in use at once, and `trim` unmaps what is free.
// Throws HostPoolFullError where the system refuses memory.
// Thread rule: any thread; a leaf lock. Ownership: a buffer goes back when its last reference goes, and shares the
// Buffers. In a forked child large buffers, which are not mapped there, are left alone.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/fork_guard.h"
#include "engine/memory/slab.h"

namespace actckpt {

using Buffer = std::shared_ptr<std::byte>;

class Buffers : public std::enable_shared_from_this<Buffers> {
 public:
  Buffer take(std::size_t bytes);

  // Returns how many bytes it gave back to the system.
  std::uint64_t trim();

 private:
  std::unique_ptr<Slab> take_free(std::size_t bytes);
  void give(std::unique_ptr<Slab> slab);

  const ForkGuard fork_guard_;
  std::mutex mutex_;                         // leaf
  std::vector<std::unique_ptr<Slab>> free_;  // the longest unused first
  std::uint64_t free_bytes_ = 0;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t peak_used_bytes_ = 0;
};

}  // namespace actckpt
