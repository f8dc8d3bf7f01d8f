#include "engine/memory/extents.h"

#include <algorithm>
#include <iterator>

namespace actckpt {

void Extents::insert(Extent extent) {
  by_start_.emplace(extent.start, extent.bytes);
  by_size_.emplace(extent.bytes, extent.start);
  free_bytes_ += extent.bytes;
}

void Extents::erase(Extent extent) {
  by_start_.erase(extent.start);
  by_size_.erase({extent.bytes, extent.start});
  free_bytes_ -= extent.bytes;
}

void Extents::add_region(Extent region) {
  region_starts_.insert(region.start);
  insert(region);
}

bool Extents::remove_region(Extent region) {
  const auto found = by_start_.find(region.start);
  if (found == by_start_.end() || found->second != region.bytes) {
    return false;
  }
  erase(region);
  region_starts_.erase(region.start);
  return true;
}

void Extents::extend_region(Extent more) { give(more); }

bool Extents::take(std::uint64_t bytes, std::vector<Extent>* out) {
  std::uint64_t left = round_up(bytes, kGranule);
  if (left > free_bytes_) {
    return false;
  }
  while (left > 0) {
    auto best = by_size_.lower_bound({left, 0});
    if (best == by_size_.end()) {
      best = std::prev(best);
    }
    const Extent whole{best->second, best->first};
    const std::uint64_t cut = std::min(whole.bytes, left);
    erase(whole);
    if (cut < whole.bytes) {
      insert({whole.start + cut, whole.bytes - cut});
    }
    out->push_back({whole.start, cut});
    left -= cut;
  }
  return true;
}

void Extents::give(Extent extent) {
  const auto next = by_start_.lower_bound(extent.start);
  if (next != by_start_.begin() && region_starts_.count(extent.start) == 0) {
    const auto before = std::prev(next);
    if (before->first + before->second == extent.start) {
      const Extent merged{before->first, before->second};
      erase(merged);
      extent = {merged.start, merged.bytes + extent.bytes};
    }
  }
  const std::uint64_t end = extent.start + extent.bytes;
  const auto after = by_start_.find(end);
  if (after != by_start_.end() && region_starts_.count(end) == 0) {
    const Extent merged{after->first, after->second};
    erase(merged);
    extent.bytes += merged.bytes;
  }
  insert(extent);
}

}  // namespace actckpt
