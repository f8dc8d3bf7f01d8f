// A bounded set of aligned buffers between memory of any alignment and direct I/O.
//
// Contract: `lease` gives one buffer and waits while all are out; a holder must not lease a second
// one. Buffers are mapped on first use. Thread rule: any thread; lease blocks. Ownership: a Lease
// returns its buffer on destruction and must not outlive the ring.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "engine/memory/slab.h"

namespace actckpt {

class BounceRing {
 public:
  class Lease {
   public:
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&&) = delete;
    ~Lease() noexcept;
    std::byte* data() const { return data_; }
    std::size_t bytes() const { return ring_->buffer_bytes_; }

   private:
    friend class BounceRing;
    Lease(BounceRing* ring, std::byte* data) : ring_(ring), data_(data) {}
    BounceRing* ring_;
    std::byte* data_;
  };

  BounceRing(int num_buffers, std::size_t buffer_bytes);
  Lease lease();

 private:
  const std::size_t buffer_bytes_;
  std::mutex mutex_;
  std::condition_variable returned_;
  int num_unmapped_;
  std::vector<Slab> slabs_;
  std::vector<std::byte*> free_;
};

}  // namespace actckpt
