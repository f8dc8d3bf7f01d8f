#include "engine/memory/pool.h"

#include <algorithm>
#include <utility>

#include "engine/errors.h"

namespace actckpt {

Block::Block(Block&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      segments_(std::move(other.segments_)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    reset();
    pool_ = std::exchange(other.pool_, nullptr);
    segments_ = std::move(other.segments_);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Block::~Block() noexcept { reset(); }

void Block::reset() noexcept {
  if (pool_ != nullptr) {
    std::exchange(pool_, nullptr)->give(segments_, bytes_);
  }
  segments_.clear();
}

Pool::Pool(const PoolConfig& config, SlabRegistrar* registrar)
    : config_(config), registrar_(registrar), limit_bytes_(config.limit_bytes) {}

Pool::~Pool() noexcept {
  if (fork_guard_.forked()) {
    // The slabs are not mapped here: unmapping their addresses could hit a stranger's memory.
    new std::map<std::byte*, Slab>(std::move(slabs_));
  }
}

bool Pool::obtain(std::size_t bytes, Block* block, std::string* why) {
  while (!take(bytes, block)) {
    if (!grow(bytes, why)) {
      return false;
    }
  }
  return true;
}

std::optional<Block> Pool::try_allocate(std::size_t bytes) {
  Block block;
  std::string why;
  if (!obtain(bytes, &block, &why)) {
    return std::nullopt;
  }
  return block;
}

std::optional<Block> Pool::try_reuse(std::size_t bytes) {
  Block block;
  if (!take(bytes, &block)) {
    return std::nullopt;
  }
  return block;
}

Block Pool::allocate(std::size_t bytes) {
  Block block;
  std::string why;
  if (!obtain(bytes, &block, &why)) {
    const PoolStats now = stats();
    throw OffloadFullError("cannot hold " + format_bytes(bytes) + " in host memory.\nPool limit " +
                           format_bytes(now.limit_bytes) + ", mapped " + format_bytes(now.pool_bytes) + ", in use " +
                           format_bytes(now.stored_bytes) + ", free " + format_bytes(now.free_bytes) +
                           (why.empty() ? "" : "; " + why) + ".\nRaise host_limit, or offload less.");
  }
  return block;
}

bool Pool::take(std::size_t bytes, Block* block) {
  fork_guard_.check("pool");
  std::vector<Extent> extents;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!extents_.take(bytes, &extents)) {
      return false;
    }
    stats_.stored_bytes += bytes;
    stats_.peak_stored_bytes = std::max(stats_.peak_stored_bytes, stats_.stored_bytes);
    ++stats_.num_blocks;
  }
  std::size_t left = bytes;
  block->segments_.reserve(extents.size());
  for (const Extent& extent : extents) {
    const std::size_t used = std::min<std::size_t>(extent.bytes, left);
    block->segments_.push_back({reinterpret_cast<std::byte*>(extent.start), used});
    left -= used;
  }
  block->pool_ = this;
  block->bytes_ = bytes;
  return true;
}

std::uint64_t Pool::growth_bytes(std::uint64_t missing) const {
  constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
  const std::uint64_t room = (limit_bytes_ - stats_.pool_bytes) / kGranule * kGranule;
  const std::uint64_t step = std::max(config_.slab_bytes, stats_.pool_bytes / 100 * config_.growth_percent);
  const std::uint64_t wanted = std::max(round_up(missing, kGranule), step);
  const std::uint64_t rounded = round_up(wanted, wanted >= kHugePage ? kHugePage : kGranule);
  return missing > room ? 0 : std::min(rounded, room);
}

bool Pool::grow(std::size_t bytes, std::string* why) {
  const std::lock_guard<std::mutex> growing(grow_mutex_);
  std::uint64_t slab_bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::uint64_t wanted = round_up(bytes, kGranule);
    if (wanted <= extents_.free_bytes()) {
      return true;  // another thread grew or trimmed meanwhile
    }
    slab_bytes = growth_bytes(wanted - extents_.free_bytes());
  }
  if (slab_bytes == 0) {
    return false;
  }
  try {
    Slab slab(slab_bytes, registrar_);
    std::byte* const start = slab.data();
    const std::lock_guard<std::mutex> lock(mutex_);
    slabs_.emplace(start, std::move(slab));
    extents_.add_region({reinterpret_cast<std::uintptr_t>(start), slab_bytes});
    stats_.pool_bytes += slab_bytes;
    stats_.peak_pool_bytes = std::max(stats_.peak_pool_bytes, stats_.pool_bytes);
    return true;
  } catch (const PinRefusedError& refused) {
    *why = refused.what();
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_bytes_ = stats_.pool_bytes;
    ++stats_.num_refused_pins;
    return false;
  } catch (const OffloadFullError& refused) {
    *why = refused.what();
    return false;
  }
}

void Pool::give(const std::vector<Segment>& segments, std::size_t bytes) noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Segment& segment : segments) {
    extents_.give({reinterpret_cast<std::uintptr_t>(segment.ptr), round_up(segment.bytes, kGranule)});
  }
  stats_.stored_bytes -= bytes;
  --stats_.num_blocks;
}

std::uint64_t Pool::trim() {
  fork_guard_.check("pool.trim");
  const std::lock_guard<std::mutex> growing(grow_mutex_);
  std::vector<Slab> unused;
  std::uint64_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = slabs_.begin(); it != slabs_.end();) {
      Slab& slab = it->second;
      if (!extents_.remove_region({reinterpret_cast<std::uintptr_t>(slab.data()), slab.bytes()})) {
        ++it;
        continue;
      }
      bytes += slab.bytes();
      unused.push_back(std::move(slab));
      it = slabs_.erase(it);
    }
    stats_.pool_bytes -= bytes;
  }
  return bytes;  // `unused` unmaps after the fast path's locks are released
}

PoolStats Pool::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  PoolStats now = stats_;
  now.limit_bytes = limit_bytes_;
  now.free_bytes = extents_.free_bytes();
  now.largest_free_bytes = extents_.largest();
  now.num_slabs = slabs_.size();
  return now;
}

}  // namespace actckpt
