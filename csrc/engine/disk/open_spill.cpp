#include "engine/disk/open_spill.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "engine/errors.h"
#include "engine/memory/extents.h"

namespace actckpt {
namespace {

// Headers older than Linux 6.1 lack these.
constexpr unsigned kStatxDioAlign = 0x2000;

struct DirectAlignment {
  unsigned memory = 0;
  unsigned offset = 0;
};

// False if the kernel does not report it.
bool query_direct_alignment(int fd, DirectAlignment* alignment) {
  // struct statx with its spare words; stx_dio_mem_align follows stx_mnt_id at byte 0x98.
  alignas(8) unsigned char raw[256] = {};
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, raw) != 0) {
    return false;
  }
  unsigned mask = 0;
  std::memcpy(&mask, raw, sizeof(mask));
  if ((mask & kStatxDioAlign) == 0) {
    return false;
  }
  std::memcpy(&alignment->memory, raw + 0x98, sizeof(unsigned));
  std::memcpy(&alignment->offset, raw + 0x9c, sizeof(unsigned));
  return true;
}

int open_named(const std::string& folder) {
  std::string path = folder + "/actckpt-spill-XXXXXX";
  const int fd = mkostemp(path.data(), O_CLOEXEC);
  if (fd >= 0) {
    unlink(path.c_str());
  }
  return fd;
}

}  // namespace

OpenedSpill open_spill(const std::string& folder, bool want_direct) {
  int fd = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    fd = open_named(folder);
  }
  if (fd < 0) {
    throw OffloadError("cannot make a spill file in '" + folder + "': " + format_errno(errno) +
                       ". Set spill_dir to a writable folder.");
  }
  OpenedSpill opened{fd, false, false};
  const int flags = fcntl(fd, F_GETFL);
  if (!want_direct || flags < 0 || fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) {
    return opened;
  }
  opened.direct = true;
  DirectAlignment alignment;
  if (!query_direct_alignment(fd, &alignment)) {
    opened.needs_probing = true;
  } else if (alignment.offset == 0 || kGranule % alignment.offset != 0 || kGranule % alignment.memory != 0) {
    opened.direct = fcntl(fd, F_SETFL, flags) != 0;
  }
  return opened;
}

}  // namespace actckpt
