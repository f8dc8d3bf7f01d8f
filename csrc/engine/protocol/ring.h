// Bounce buffers: a bounded set of pinned buffers of one size, in stream order.
//
// Contract: `give` takes a buffer with the events that its owner left in it. Its next owner waits for those: a stream
// in its own order (`take`), a worker after the host has seen them pass (`take_passed`). The memory is mapped and
// pinned at the first take; if that is refused, the ring stays empty.
// Thread rule: the owner serialises. Ownership: owns the memory; buffers taken must not outlive it.

#pragma once

#include <cstddef>
#include <deque>
#include <optional>

#include "engine/fork_guard.h"
#include "engine/memory/slab.h"
#include "engine/protocol/backend.h"
#include "engine/protocol/slots.h"

namespace actckpt {

class Ring {
 public:
  Ring(std::size_t num_buffers, std::size_t buffer_bytes, SlabRegistrar* registrar)
      : num_buffers_(num_buffers), buffer_bytes_(buffer_bytes), registrar_(registrar) {}
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() noexcept;

  // Null when all are out. Throws DeviceError if a query fails.
  std::byte* take(Backend* backend, Fences* fences);
  std::byte* take_passed(Backend* backend);
  void give(std::byte* buffer, Fences fences);

  std::size_t num_free();
  std::size_t num_buffers();
  std::size_t mapped_bytes() const { return slab_.has_value() ? slab_->bytes() : 0; }
  std::size_t buffer_bytes() const { return buffer_bytes_; }

 private:
  struct Free {
    std::byte* buffer;
    Fences fences;
  };
  void open();

  const ForkGuard fork_guard_;
  std::size_t num_buffers_;
  const std::size_t buffer_bytes_;
  SlabRegistrar* const registrar_;
  std::optional<Slab> slab_;
  std::deque<Free> free_;
};

}  // namespace actckpt
