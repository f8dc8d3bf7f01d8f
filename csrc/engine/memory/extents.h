// Free ranges of an address space, and how requests are cut from them.
//
// Contract: `take` succeeds whenever `free_bytes() >= bytes`: a request that no single range fits is composed of
// several, largest first. Ranges of different regions never merge, so no range crosses a region's border. Every size
// and start is a multiple of kGranule.
// Thread rule: none of its own; the owner locks. Ownership: numbers only, no memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace actckpt {

inline constexpr std::uint64_t kGranule = 4096;

constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Extent {
  std::uint64_t start;
  std::uint64_t bytes;
};

class Extents {
 public:
  // Adds a region, all of it free.
  void add_region(Extent region);

  // Removes a region if all of it is free, else leaves it and returns false.
  bool remove_region(Extent region);

  // Makes a region that ends where `more` starts longer by `more`, which is free.
  void extend_region(Extent more);

  // Cuts `bytes` (rounded up to the granule) from the free ranges: best fit, else several, largest
  // first. Returns false and changes nothing if there are too few free bytes.
  bool take(std::uint64_t bytes, std::vector<Extent>* out);

  // Returns one extent of an earlier take.
  void give(Extent extent);

  std::uint64_t free_bytes() const { return free_bytes_; }
  std::uint64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

 private:
  void insert(Extent extent);
  void erase(Extent extent);

  std::map<std::uint64_t, std::uint64_t> by_start_;            // start -> bytes
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // (bytes, start)
  std::set<std::uint64_t> region_starts_;
  std::uint64_t free_bytes_ = 0;
};

}  // namespace actckpt
