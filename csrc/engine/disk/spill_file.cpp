#include "engine/disk/spill_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engine/disk/hash.h"
#include "engine/disk/open_spill.h"
#include "engine/errors.h"
#include "engine/memory/slab.h"

namespace actckpt {
namespace {

std::string format_hex(std::uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 60; shift >= 0; shift -= 4) {
    text += kDigits[(value >> shift) & 15];
  }
  return text;
}

}  // namespace

SpillBlock::SpillBlock(SpillBlock&& other) noexcept
    : file_(std::exchange(other.file_, nullptr)),
      extents_(std::move(other.extents_)),
      bytes_(other.bytes_),
      checksum_(other.checksum_) {}

SpillBlock& SpillBlock::operator=(SpillBlock&& other) noexcept {
  if (this != &other) {
    reset();
    file_ = std::exchange(other.file_, nullptr);
    extents_ = std::move(other.extents_);
    bytes_ = other.bytes_;
    checksum_ = other.checksum_;
  }
  return *this;
}

SpillBlock::~SpillBlock() noexcept { reset(); }

void SpillBlock::reset() noexcept {
  if (file_ != nullptr) {
    std::exchange(file_, nullptr)->give(extents_);
  }
  extents_.clear();
}

SpillFile::SpillFile(const SpillConfig& config, std::shared_ptr<FileIo> io)
    : config_(config), io_(io != nullptr ? std::move(io) : std::make_shared<SystemFileIo>()) {
  const OpenedSpill opened = open_spill(config.folder, config.direct);
  fd_ = opened.fd;
  direct_ = opened.direct;
  if (opened.needs_probing && !probe_direct()) {
    const int flags = fcntl(fd_, F_GETFL);
    direct_ = flags < 0 || fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0;
  }
  stats_.limit_bytes = config.limit_bytes;
}

SpillFile::~SpillFile() noexcept { close(fd_); }

bool SpillFile::probe_direct() {
  const Slab buffer(kGranule, nullptr);
  const bool writes = pwrite(fd_, buffer.data(), kGranule, 0) == static_cast<ssize_t>(kGranule);
  return (writes && pread(fd_, buffer.data(), kGranule, 0) == static_cast<ssize_t>(kGranule)) || errno == ENOSPC;
}

std::optional<SpillBlock> SpillFile::try_reserve(std::size_t bytes) {
  fork_guard_.check("spill file");
  SpillBlock block;
  block.bytes_ = bytes;
  const std::uint64_t wanted = round_up(bytes, kGranule);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (wanted > config_.limit_bytes - stats_.disk_bytes) {
    return std::nullopt;
  }
  if (wanted > extents_.free_bytes()) {
    const std::uint64_t missing = wanted - extents_.free_bytes();
    extents_.extend_region({stats_.file_bytes, missing});
    stats_.file_bytes += missing;
  }
  extents_.take(wanted, &block.extents_);
  stats_.disk_bytes += wanted;
  stats_.peak_disk_bytes = std::max(stats_.peak_disk_bytes, stats_.disk_bytes);
  ++stats_.num_blocks;
  block.file_ = this;
  return block;
}

void SpillFile::give(const std::vector<Extent>& extents) noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Extent& extent : extents) {
    extents_.give(extent);
    stats_.disk_bytes -= extent.bytes;
  }
  --stats_.num_blocks;
}

void SpillFile::write(SpillBlock* block, std::byte* buffer) {
  fork_guard_.check("spill file");
  block->checksum_ = hash64(buffer, block->bytes_);
  std::memset(buffer + block->bytes_, 0, round_up(block->bytes_, kGranule) - block->bytes_);
  for (const Extent& extent : block->extents_) {
    write_fully(buffer, extent.bytes, extent.start);
    buffer += extent.bytes;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.written_bytes += block->bytes_;
}

void SpillFile::write_fully(const std::byte* data, std::size_t bytes, std::uint64_t offset) {
  std::size_t done = 0;
  int num_stuck = 0;
  while (done < bytes) {
    const ssize_t wrote = io_->write_at(fd_, data + done, bytes - done, static_cast<off_t>(offset + done));
    const int code = wrote < 0 ? errno : 0;
    if (wrote < 0 && code == EINTR) {
      continue;
    }
    // Direct I/O continues at a granule only, so the odd end of a short write is written again.
    const std::size_t whole = wrote < 0 ? 0 : static_cast<std::size_t>(wrote);
    const std::size_t next = done + whole == bytes ? bytes : (done + whole) / kGranule * kGranule;
    num_stuck = next > done ? 0 : num_stuck + 1;
    done = std::max(done, next);
    if (wrote < 0 || num_stuck == 8) {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++stats_.num_failed_writes;
      const std::string what = "write of " + format_bytes(bytes - done) + " at offset " +
                               std::to_string(offset + done) + " of the spill file in '" + config_.folder +
                               "' failed: " + (code != 0 ? format_errno(code) : "no byte is accepted") +
                               ". Free space there, or set spill_dir or disk_limit.";
      if (code == ENOSPC || code == EDQUOT || code == EFBIG) {
        throw OffloadFullError(what);
      }
      throw OffloadError(what);
    }
  }
}

void SpillFile::read(const SpillBlock& block, std::byte* buffer) {
  fork_guard_.check("spill file");
  std::byte* next = buffer;
  for (const Extent& extent : block.extents_) {
    read_fully(next, extent.bytes, extent.start);
    next += extent.bytes;
  }
  const std::uint64_t checksum = hash64(buffer, block.bytes_);
  if (checksum != block.checksum_) {
    fail_read(block.extents_.empty() ? 0 : block.extents_.front().start, block.bytes_,
              "gave checksum " + format_hex(checksum) + ", written was " + format_hex(block.checksum_));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.read_bytes += block.bytes_;
}

void SpillFile::read_fully(std::byte* data, std::size_t bytes, std::uint64_t offset) {
  std::size_t done = 0;
  int num_stuck = 0;
  while (done < bytes) {
    const ssize_t got = io_->read_at(fd_, data + done, bytes - done, static_cast<off_t>(offset + done));
    const int code = got < 0 ? errno : 0;
    if (got < 0 && code == EINTR) {
      continue;
    }
    if (got < 0) {
      fail_read(offset + done, bytes - done, "failed: " + format_errno(code));
    }
    const std::size_t whole = static_cast<std::size_t>(got);
    const std::size_t next = done + whole == bytes ? bytes : (done + whole) / kGranule * kGranule;
    num_stuck = next > done ? 0 : num_stuck + 1;
    done = std::max(done, next);
    if (got == 0 || num_stuck == 8) {
      fail_read(offset + done, bytes - done, "found the end of the file");
    }
  }
}

void SpillFile::fail_read(std::uint64_t offset, std::size_t bytes, const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.num_failed_reads;
  }
  throw OffloadReadError("read of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                         " of the spill file in '" + config_.folder + "' " + why +
                         ". The offloaded bytes are lost; check that disk, or set spill_dir.");
}

SpillStats SpillFile::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

bool is_memory_folder(const std::string& folder) {
  struct statfs info;
  if (statfs(folder.c_str(), &info) != 0) {
    return false;
  }
  constexpr std::uint64_t kRamfsMagic = 0x858458f6;
  const auto type = static_cast<std::uint64_t>(static_cast<std::uint32_t>(info.f_type));
  return type == TMPFS_MAGIC || type == kRamfsMagic;
}

}  // namespace actckpt
