// Host memory for offloaded bytes: few large slabs, cut into 4 KiB-granular extents.
//
// Contract:
//  - A block's bytes lie in one or several segments; no segment crosses a slab, so no copy does.
//  - The slabs together never exceed the limit. `allocate` fails only when limit or system refuse.
//  - Free extents are used before the pool grows, whatever their sizes, so the pool is at most the
//    peak of stored bytes (tails rounded up to 4 KiB) plus one growth step.
//  - The pool grows by max(slab_bytes, growth_percent of itself), or less close to the limit; a larger request gets a
//    slab
//    of its size.
//  - If the registrar refuses a slab, the limit becomes the current size.
// Thread rule: every call from any thread. Giving a block back takes a leaf lock and makes no
// system call; growing and trimming map memory outside that lock.
// Ownership: a Block returns its extents on destruction and must not outlive its pool.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/fork_guard.h"
#include "engine/memory/extents.h"
#include "engine/memory/slab.h"

namespace actckpt {

struct Segment {
  std::byte* ptr;
  std::size_t bytes;
};

class Pool;

class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  ~Block() noexcept;

  // In order; their bytes add up to `bytes()`. Empty for a block of zero bytes.
  const std::vector<Segment>& segments() const { return segments_; }
  std::size_t bytes() const { return bytes_; }

 private:
  friend class Pool;
  void reset() noexcept;

  Pool* pool_ = nullptr;
  std::vector<Segment> segments_;
  std::size_t bytes_ = 0;
};

struct PoolConfig {
  std::uint64_t limit_bytes = UINT64_MAX;
  std::uint64_t slab_bytes = std::uint64_t{64} << 20;
  std::uint64_t growth_percent = 3;
};

struct PoolStats {
  std::uint64_t limit_bytes = 0;  // as configured, or lower after a refused pin
  std::uint64_t pool_bytes = 0;   // mapped
  std::uint64_t peak_pool_bytes = 0;
  std::uint64_t stored_bytes = 0;  // asked for by live blocks
  std::uint64_t peak_stored_bytes = 0;
  std::uint64_t free_bytes = 0;
  std::uint64_t largest_free_bytes = 0;
  std::uint64_t num_slabs = 0;
  std::uint64_t num_blocks = 0;
  std::uint64_t num_refused_pins = 0;
};

class Pool {
 public:
  // `registrar` may be null and must outlive the pool.
  explicit Pool(const PoolConfig& config, SlabRegistrar* registrar = nullptr);
  ~Pool() noexcept;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Throws OffloadFullError with the numbers of both sides.
  Block allocate(std::size_t bytes);

  // The same without the exception; empty when the limit or the system refuses.
  std::optional<Block> try_allocate(std::size_t bytes);

  // The same from free extents only: the pool does not grow, nothing is mapped.
  std::optional<Block> try_reuse(std::size_t bytes);

  // Unmaps slabs that hold no block; returns the bytes given back to the system.
  std::uint64_t trim();

  PoolStats stats() const;

 private:
  friend class Block;
  bool obtain(std::size_t bytes, Block* block, std::string* why);
  bool take(std::size_t bytes, Block* block);
  bool grow(std::size_t bytes, std::string* why);
  std::uint64_t growth_bytes(std::uint64_t missing) const;
  void give(const std::vector<Segment>& segments, std::size_t bytes) noexcept;

  const PoolConfig config_;
  SlabRegistrar* const registrar_;
  const ForkGuard fork_guard_;
  std::mutex grow_mutex_;     // one growth or trim at a time; taken before mutex_
  mutable std::mutex mutex_;  // leaf
  std::uint64_t limit_bytes_;
  Extents extents_;
  std::map<std::byte*, Slab> slabs_;
  PoolStats stats_;
};

}  // namespace actckpt
