// Flags conflicting accesses to a cell of memory that no happens-before edge orders.
//
// Contract: two accesses to one cell conflict if at least one writes; each must be covered by the
// later one's clock. A cell is kCellBytes of device or host memory, named by its address. Every
// race is counted, the first few are described. Thread rule: one thread. Ownership: none of the
// memory.

#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sim/clock.h"

namespace actckpt::sim {

inline constexpr std::uint64_t kCellBytes = 4096;

class Checker {
 public:
  // An operation named `what` with clock `clock`, whose own component is (queue, tick).
  void read(std::uint64_t cell, int queue, std::uint32_t tick, const Clock& clock, const char* what);
  void write(std::uint64_t cell, int queue, std::uint32_t tick, const Clock& clock, const char* what);

  std::uint64_t num_races() const { return num_races_; }
  const std::vector<std::string>& descriptions() const { return descriptions_; }

 private:
  struct Access {
    int queue = 0;
    std::uint32_t tick = 0;  // 0: none
    const char* what = "";
  };
  struct Cell {
    Access writer;
    std::vector<Access> readers;  // the latest of each queue since the last write
  };
  void require(const Access& earlier, const Clock& clock, std::uint64_t cell, const char* kind, const char* what);

  std::unordered_map<std::uint64_t, Cell> cells_;
  std::uint64_t num_races_ = 0;
  std::vector<std::string> descriptions_;
};

}  // namespace actckpt::sim
