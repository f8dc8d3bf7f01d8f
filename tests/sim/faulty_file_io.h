// A file system that is short, full, broken, altered or slow on demand.
//
// Contract: as FileIo. Thread rule: any thread at once.

#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "engine/disk/file_io.h"

namespace actckpt::sim {

inline constexpr std::uint64_t kNever = UINT64_MAX;

// What goes wrong, and when. Offsets are positions in the file.
struct Faults {
  std::uint64_t fail_write_at = kNever;  // writes end before this byte, then fail
  int write_errno = 28;                  // ENOSPC
  std::uint64_t max_write_bytes = kNever;
  std::uint64_t fail_read_at = kNever;  // a read that covers this byte fails
  int read_errno = 5;                   // EIO
  std::uint64_t max_read_bytes = kNever;
  std::uint64_t alter_read_at = kNever;   // this byte comes back with its lowest bit flipped
  std::uint64_t end_of_file_at = kNever;  // reads end here
  bool hold_writes = false;               // calls wait until this is false
  bool hold_reads = false;
};

// `set` takes effect at once, also for held calls.
class FaultyFileIo : public FileIo {
 public:
  void set(const Faults& faults);
  // Calls held right now.
  int num_held() const;
  ssize_t write_at(int fd, const void* data, std::size_t bytes, off_t offset) override;
  ssize_t read_at(int fd, void* data, std::size_t bytes, off_t offset) override;

 private:
  Faults wait(bool Faults::* hold);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Faults faults_;
  int num_held_ = 0;
  SystemFileIo system_;
};

}  // namespace actckpt::sim
