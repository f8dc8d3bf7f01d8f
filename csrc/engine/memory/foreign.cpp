#include "engine/memory/foreign.h"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "engine/errors.h"
#include "engine/memory/extents.h"

namespace actckpt {
namespace {

// As process_vm_readv: how many bytes were read, or -1 with errno set.
ssize_t read_own(std::byte* dst, const std::byte* src, std::size_t bytes) {
  const iovec to{dst, bytes};
  const iovec from{const_cast<std::byte*>(src), bytes};
  return process_vm_readv(getpid(), &to, 1, &from, 1, 0);  // not a cached pid: the process may have forked
}

// It must read mapped memory, and report unmapped memory.
std::string try_reading() {
  void* const page = mmap(nullptr, 2 * kGranule, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return "cannot map a page to try it: " + format_errno(errno);
  }
  auto* const first = static_cast<std::byte*>(page);
  first[kGranule - 1] = std::byte{42};
  munmap(first + kGranule, kGranule);
  std::byte found[2] = {};
  std::string why;
  if (read_own(found, first + kGranule - 1, 1) != 1) {
    why = "process_vm_readv of this process fails: " + format_errno(errno);
  } else if (found[0] != std::byte{42}) {
    why = "process_vm_readv of this process gives other bytes";
  } else if (read_own(found, first + kGranule - 1, 2) == 2) {
    why = "process_vm_readv reads where nothing is mapped";
  }
  munmap(page, kGranule);
  return why;
}

}  // namespace

const std::string& why_foreign_reads_are_plain() {
  static const std::string why = try_reading();
  return why;
}

void copy_foreign(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (!why_foreign_reads_are_plain().empty()) {
    std::memcpy(dst, src, bytes);
    return;
  }
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t got = read_own(dst + done, src + done, bytes - done);
    if (got <= 0) {
      throw SourceGoneError("cannot read " + format_bytes(bytes - done) + " of a tensor that is being offloaded: " +
                            (got == 0 ? "no byte is given" : format_errno(errno)) +
                            ". Its memory was freed while it was copied; do not enlarge a saved "
                            "tensor inside the block.");
    }
    done += static_cast<std::size_t>(got);
  }
}

}  // namespace actckpt
