// Storage for the bytes of CPU tensors: one interface for every tier.
//
// Contract: `write` returns a handle only once every byte is safe, else throws an OffloadError and
// the source is untouched; a SourceGoneError where its memory was freed. `read` fills `dst` with exactly those bytes or
// throws. A handle gives its space back on destruction, without blocking, and must not outlive its store. Thread rule:
// any thread; write and read may block. Ownership: the caller owns the handle.

#pragma once

#include <cstddef>
#include <memory>

#include "engine/disk/spill_file.h"
#include "engine/memory/pool.h"

namespace actckpt {

class StoredBytes {
 public:
  virtual ~StoredBytes() = default;
};

class ByteStore {
 public:
  virtual ~ByteStore() = default;
  virtual std::unique_ptr<StoredBytes> write(const std::byte* src, std::size_t bytes) = 0;
  virtual void read(const StoredBytes& stored, std::byte* dst) = 0;
};

// Host memory of a pool. For tests: it assumes that the memory of sources stays mapped.
class PoolStore : public ByteStore {
 public:
  explicit PoolStore(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  std::unique_ptr<StoredBytes> write(const std::byte* src, std::size_t bytes) override;
  void read(const StoredBytes& stored, std::byte* dst) override;

 private:
  const std::shared_ptr<Pool> pool_;
};

// A spill file.
class DiskStore : public ByteStore {
 public:
  explicit DiskStore(std::shared_ptr<SpillFile> file) : file_(std::move(file)) {}
  std::unique_ptr<StoredBytes> write(const std::byte* src, std::size_t bytes) override;
  void read(const StoredBytes& stored, std::byte* dst) override;

 private:
  const std::shared_ptr<SpillFile> file_;
};

}  // namespace actckpt
