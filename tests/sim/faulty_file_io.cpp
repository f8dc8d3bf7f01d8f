#include "sim/faulty_file_io.h"

#include <algorithm>
#include <cerrno>

namespace actckpt::sim {
namespace {

constexpr std::size_t kSector = 4096;

}  // namespace

void FaultyFileIo::set(const Faults& faults) {
  const std::lock_guard<std::mutex> lock(mutex_);
  faults_ = faults;
  changed_.notify_all();
}

int FaultyFileIo::num_held() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_held_;
}

Faults FaultyFileIo::wait(bool Faults::* hold) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_held_;
  changed_.wait(lock, [&] { return !(faults_.*hold); });
  --num_held_;
  return faults_;
}

ssize_t FaultyFileIo::write_at(int fd, const void* data, std::size_t bytes, off_t offset) {
  const Faults faults = wait(&Faults::hold_writes);
  const auto start = static_cast<std::uint64_t>(offset);
  if (start + bytes > faults.fail_write_at) {
    if (start + kSector > faults.fail_write_at) {
      errno = faults.write_errno;
      return -1;
    }
    bytes = faults.fail_write_at - start;  // a short write comes before the error
  }
  bytes = std::min<std::uint64_t>(bytes, faults.max_write_bytes);
  // A short direct write may end anywhere; the system call below must be given whole sectors.
  const std::size_t whole = bytes / kSector * kSector;
  const ssize_t written = whole == 0 ? 0 : system_.write_at(fd, data, whole, offset);
  return written < 0 ? written : static_cast<ssize_t>(bytes);
}

ssize_t FaultyFileIo::read_at(int fd, void* data, std::size_t bytes, off_t offset) {
  const Faults faults = wait(&Faults::hold_reads);
  const auto start = static_cast<std::uint64_t>(offset);
  if (faults.fail_read_at >= start && faults.fail_read_at < start + bytes) {
    errno = faults.read_errno;
    return -1;
  }
  if (start >= faults.end_of_file_at) {
    return 0;
  }
  const ssize_t got = system_.read_at(fd, data, bytes, offset);
  if (got <= 0) {
    return got;
  }
  std::uint64_t given = static_cast<std::uint64_t>(got);
  given = std::min({given, faults.max_read_bytes, faults.end_of_file_at - start});
  if (faults.alter_read_at >= start && faults.alter_read_at < start + given) {
    static_cast<unsigned char*>(data)[faults.alter_read_at - start] ^= 1;
  }
  return static_cast<ssize_t>(given);
}

}  // namespace actckpt::sim
