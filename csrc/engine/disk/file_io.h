// The two system calls of the spill file, behind an interface so that tests can make them fail.
//
// Contract: as pwrite and pread: the number of bytes moved, possibly fewer than asked, or -1 with
// errno set. Thread rule: any thread at once. Ownership: the descriptor stays the caller's.

#pragma once

#include <sys/types.h>

#include <cstddef>

namespace actckpt {

class FileIo {
 public:
  virtual ~FileIo() = default;
  virtual ssize_t write_at(int fd, const void* data, std::size_t bytes, off_t offset) = 0;
  virtual ssize_t read_at(int fd, void* data, std::size_t bytes, off_t offset) = 0;
};

class SystemFileIo : public FileIo {
 public:
  ssize_t write_at(int fd, const void* data, std::size_t bytes, off_t offset) override;
  ssize_t read_at(int fd, void* data, std::size_t bytes, off_t offset) override;
};

}  // namespace actckpt
