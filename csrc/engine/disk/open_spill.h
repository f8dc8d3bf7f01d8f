// Opens a file that has no name.
//
// Contract: O_TMPFILE where the file system knows it, else mkostemp and unlink. Reports whether the
// descriptor does direct I/O with the engine's granule. Throws OffloadError naming the folder.
// Thread rule: any thread. Ownership: the caller closes the descriptor.

#pragma once

#include <string>

namespace actckpt {

struct OpenedSpill {
  int fd;
  bool direct;         // O_DIRECT is set
  bool needs_probing;  // the kernel did not report whether direct I/O works
};

OpenedSpill open_spill(const std::string& folder, bool want_direct);

}  // namespace actckpt
