#include "engine/memory/slab.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "engine/memory/extents.h"

namespace actckpt {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Maps `bytes` at a multiple of `alignment`; null on failure.
std::byte* map_aligned(std::size_t bytes, std::size_t alignment) {
  const std::size_t slack = alignment > kGranule ? alignment : 0;
  void* raw = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) {
    return nullptr;
  }
  const auto start = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = round_up(start, alignment);
  if (aligned > start) {
    munmap(raw, aligned - start);
  }
  const std::size_t tail = start + slack - aligned;
  if (tail > 0) {
    munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  }
  return reinterpret_cast<std::byte*>(aligned);
}

}  // namespace

Slab::Slab(std::size_t bytes, SlabRegistrar* registrar)
    : data_(map_aligned(bytes, bytes >= kHugePage ? kHugePage : kGranule)), bytes_(bytes), registrar_(registrar) {
  if (data_ == nullptr) {
    throw OffloadFullError("cannot map " + format_bytes(bytes) + " of host memory: " + format_errno(errno) +
                           ". Lower host_limit or free memory.");
  }
  // Advice only: a kernel without one of these is still correct.
  madvise(data_, bytes_, MADV_HUGEPAGE);
  madvise(data_, bytes_, MADV_DONTFORK);
  madvise(data_, bytes_, MADV_DONTDUMP);
  if (registrar_ == nullptr) {
    return;
  }
  registrar_->place(data_, bytes_);
  if (!registrar_->pin(data_, bytes_)) {
    munmap(data_, bytes_);
    throw PinRefusedError("the device driver refuses to pin " + format_bytes(bytes) +
                          " of host memory; the pool stays at its present size");
  }
}

Slab::Slab(Slab&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_), registrar_(other.registrar_) {}

Slab::~Slab() noexcept {
  if (data_ == nullptr) {
    return;
  }
  if (registrar_ != nullptr) {
    registrar_->unpin(data_, bytes_);
  }
  munmap(data_, bytes_);
}

}  // namespace actckpt
