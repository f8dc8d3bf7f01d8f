// One mapping of host memory.
//
// Contract: anonymous private pages, start aligned to 2 MiB where the slab is that large, huge
// pages advised, and neither inherited by fork nor written to core dumps: with 2 GiB pinned, a fork
// took 5 s and doubled the memory without MADV_DONTFORK. Pinned through the registrar if there is
// one.
// Thread rule: made and destroyed outside every lock. Ownership: owns the mapping and its pin.

#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/errors.h"

namespace actckpt {

// What a device backend does to a slab. Calls come without any lock held.
class SlabRegistrar {
 public:
  virtual ~SlabRegistrar() = default;

  // Before the first touch: NUMA placement and the like. Best effort.
  virtual void place(void* ptr, std::size_t bytes) noexcept {
    (void)ptr;
    (void)bytes;
  }
  // Page-locks the slab; false refuses it, and the pool stops growing.
  virtual bool pin(void* ptr, std::size_t bytes) noexcept = 0;
  virtual void unpin(void* ptr, std::size_t bytes) noexcept = 0;
};

// The registrar refused a slab.
class PinRefusedError : public OffloadFullError {
 public:
  using OffloadFullError::OffloadFullError;
};

class Slab {
 public:
  // Maps `bytes` (a multiple of 4 KiB). Throws OffloadFullError when the system refuses and
  // PinRefusedError when the registrar does; `registrar` may be null.
  Slab(std::size_t bytes, SlabRegistrar* registrar);
  Slab(Slab&& other) noexcept;
  Slab& operator=(Slab&&) = delete;
  ~Slab() noexcept;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  std::size_t bytes_;
  SlabRegistrar* registrar_;
};

}  // namespace actckpt
