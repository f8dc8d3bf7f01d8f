// Pinned host memory: what copies may touch, and what the host may not touch meanwhile.
//
// Contract: a range is pinned by torch's allocator, or registered through the driver. While a copy that the host does
// not know to have ended reads pinned memory, the host may not write it; while one writes, it may not touch it: the
// pages are protected, and a host access to a byte of the copy is a fault, after which the access goes on. Only pages
// that are pinned as a whole are protected: others may hold anything.
// System calls that touch such bytes fail with EFAULT instead.
// Thread rule: under the machine's lock. Code that holds it touches pinned bytes through OpenedPages only.
// Ownership: `allocate`d memory is ours until `free`d and past.

#pragma once

#include <map>
#include <vector>

#include "sim/device/machine/streams.h"

namespace actckpt::sim_device {

class PinnedMemory {
 public:
  // Memory for torch's tensors, whole pages. Null if the system has none.
  void* allocate(Lock& lock, std::size_t bytes);
  void free(Lock& lock, void* data);
  // The memory is used by what `stream` has been given so far: freed, it waits.
  void record_use(const Lock& lock, const void* data, Stream* stream);

  // False: it is already, or is not.
  bool add(const Lock& lock, const Range& range);
  bool remove(Lock& lock, const void* data);
  bool contains(const Range& range) const;
  std::uint64_t num_registered_bytes() const;

  // A copy was given to a stream.
  void begin_use(const Range& range, const Access& access, bool writes);
  void host_knows(const Clock& host);

 private:
  friend class OpenedPages;
  struct Pinned {
    std::uintptr_t end;
    bool is_registered;
    std::vector<Point> fences;
  };
  struct Use {
    Range range;
    Access access;
    bool writes;
  };
  struct Leaving {
    Range range;
    std::vector<Point> fences;
  };

  friend bool may_go_on(std::uintptr_t address);
  Range guarded(const Range& range) const;
  void protect(const Range& range) const;
  void end_uses(const Range& range, const char* what);
  void unmap_passed(const Lock& lock);

  std::map<std::uintptr_t, Pinned> all_;
  std::vector<Use> uses_;
  std::vector<Leaving> leaving_;
};

PinnedMemory& pinned_memory();

// While it lives, the machine itself may touch what it was given.
class OpenedPages {
 public:
  OpenedPages(const Range& first, const Range& second);
  OpenedPages(const OpenedPages&) = delete;
  OpenedPages& operator=(const OpenedPages&) = delete;
  ~OpenedPages() noexcept;

 private:
  const Range first_;
  const Range second_;
};

}  // namespace actckpt::sim_device
