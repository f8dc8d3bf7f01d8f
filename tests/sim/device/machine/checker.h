// Judges every access to device memory and pinned memory by happens-before.
//
// Contract: two accesses to one byte of which one writes must be ordered: the later one's clock covers the earlier
// one. To allocate device memory is to write it, on the stream that it belongs to. Each call reports at most one fault,
// naming both operations.
// Thread rule: under the machine's lock. Ownership: none of the memory.

#pragma once

#include <map>

#include "sim/device/machine/basics.h"

namespace actckpt::sim_device {

class Checker {
 public:
  void read(const Range& range, const Access& access, const Clock& clock);
  void write(const Range& range, const Access& access, const Clock& clock);
  // The memory goes back to the system, or comes from there.
  void forget(const Range& range);
  void clear() { pieces_.clear(); }

 private:
  struct Piece {
    std::uintptr_t end;
    Access writer;
    std::vector<Access> readers;  // the latest of each queue since the last write
  };
  using Pieces = std::map<std::uintptr_t, Piece>;  // by where they begin

  Pieces::iterator cut(std::uintptr_t at);

  Pieces pieces_;
};

Checker& checker();

}  // namespace actckpt::sim_device
