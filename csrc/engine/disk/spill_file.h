// The spill store: one unlinked file for bytes that fit neither in device nor in host memory.
//
// Contract:
//  - The file has no name once opened; its space returns to the system when the process ends, in whatever way.
//  - Direct I/O if the file system supports it, else buffered I/O. Buffers start at a multiple of kGranule and have
//  room
//    for their bytes rounded up to it. Short writes and reads are continued.
//  - `write` returns only when every byte was written, else it throws OffloadError. It sets the rounding to zero.
//  - `read` returns only bytes whose checksum equals the one taken while writing, else it throws OffloadReadError with
//    folder, offset and both numbers; the buffer then holds garbage.
//  - Freed space is reused before the file grows; space in use never exceeds the limit.
// Thread rule: any thread; write and read block on the disk. Giving a block back takes a leaf lock
// and makes no system call. Ownership: owns the descriptor; a SpillBlock must not outlive its file.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/disk/file_io.h"
#include "engine/fork_guard.h"
#include "engine/memory/extents.h"

namespace actckpt {

struct SpillConfig {
  std::string folder;
  std::uint64_t limit_bytes = UINT64_MAX;
  bool direct = true;  // false: never request direct I/O
};

struct SpillStats {
  std::uint64_t limit_bytes = 0;
  std::uint64_t disk_bytes = 0;  // held by live blocks, tails rounded up to 4 KiB
  std::uint64_t peak_disk_bytes = 0;
  std::uint64_t file_bytes = 0;  // the file's length: the peak of space in use
  std::uint64_t written_bytes = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t num_blocks = 0;
  std::uint64_t num_failed_writes = 0;
  std::uint64_t num_failed_reads = 0;
};

class SpillFile;

class SpillBlock {
 public:
  SpillBlock() = default;
  SpillBlock(SpillBlock&& other) noexcept;
  SpillBlock& operator=(SpillBlock&& other) noexcept;
  ~SpillBlock() noexcept;

  std::size_t bytes() const { return bytes_; }
  std::uint64_t checksum() const { return checksum_; }
  const std::vector<Extent>& extents() const { return extents_; }

 private:
  friend class SpillFile;
  void reset() noexcept;

  SpillFile* file_ = nullptr;
  std::vector<Extent> extents_;
  std::size_t bytes_ = 0;
  std::uint64_t checksum_ = 0;
};

class SpillFile {
 public:
  // Opens the file in `config.folder`; throws OffloadError naming folder and reason.
  // `io` null: the system's.
  explicit SpillFile(const SpillConfig& config, std::shared_ptr<FileIo> io = nullptr);
  ~SpillFile() noexcept;
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  // Empty if the limit refuses.
  std::optional<SpillBlock> try_reserve(std::size_t bytes);

  void write(SpillBlock* block, std::byte* buffer);
  void read(const SpillBlock& block, std::byte* buffer);

  SpillStats stats() const;
  bool direct() const { return direct_; }
  const std::string& folder() const { return config_.folder; }

 private:
  friend class SpillBlock;
  void give(const std::vector<Extent>& extents) noexcept;
  void write_fully(const std::byte* data, std::size_t bytes, std::uint64_t offset);
  void read_fully(std::byte* data, std::size_t bytes, std::uint64_t offset);
  bool probe_direct();
  [[noreturn]] void fail_read(std::uint64_t offset, std::size_t bytes, const std::string& why);

  const SpillConfig config_;
  const std::shared_ptr<FileIo> io_;
  const ForkGuard fork_guard_;
  int fd_ = -1;
  bool direct_ = false;
  mutable std::mutex mutex_;  // leaf; guards what follows
  Extents extents_;
  SpillStats stats_;
};

// True if `folder` lies on tmpfs or ramfs: spilling there saves no memory.
bool is_memory_folder(const std::string& folder);

}  // namespace actckpt
