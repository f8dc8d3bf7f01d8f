#include "engine/byte_store.h"

#include <cstring>
#include <utility>

namespace actckpt {
namespace {

struct PoolBytes : StoredBytes {
  explicit PoolBytes(Block b) : block(std::move(b)) {}
  Block block;
};

struct DiskBytes : StoredBytes {
  explicit DiskBytes(SpillBlock b) : block(std::move(b)) {}
  SpillBlock block;
};

}  // namespace

std::unique_ptr<StoredBytes> PoolStore::write(const std::byte* src, std::size_t bytes) {
  Block block = pool_->allocate(bytes);
  for (const Segment& segment : block.segments()) {
    std::memcpy(segment.ptr, src, segment.bytes);
    src += segment.bytes;
  }
  return std::make_unique<PoolBytes>(std::move(block));
}

void PoolStore::read(const StoredBytes& stored, std::byte* dst) {
  for (const Segment& segment : static_cast<const PoolBytes&>(stored).block.segments()) {
    std::memcpy(dst, segment.ptr, segment.bytes);
    dst += segment.bytes;
  }
}

std::unique_ptr<StoredBytes> DiskStore::write(const std::byte* src, std::size_t bytes) {
  return std::make_unique<DiskBytes>(file_->write(src, bytes));
}

void DiskStore::read(const StoredBytes& stored, std::byte* dst) {
  file_->read(static_cast<const DiskBytes&>(stored).block, dst);
}

}  // namespace actckpt
