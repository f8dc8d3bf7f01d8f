#include "engine/disk/file_io.h"

#include <unistd.h>

namespace actckpt {

ssize_t SystemFileIo::write_at(int fd, const void* data, std::size_t bytes, off_t offset) {
  return pwrite(fd, data, bytes, offset);
}

ssize_t SystemFileIo::read_at(int fd, void* data, std::size_t bytes, off_t offset) {
  return pread(fd, data, bytes, offset);
}

}  // namespace actckpt
