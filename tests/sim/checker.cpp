#include "sim/checker.h"

namespace actckpt::sim {

void Checker::require(const Access& earlier, const Clock& clock, std::uint64_t cell, const char* kind,
                      const char* what) {
  if (clock.covers(earlier.queue, earlier.tick)) {
    return;
  }
  if (++num_races_ <= 3) {
    descriptions_.push_back(std::string(what) + " " + kind + " cell " + std::to_string(cell) + " unordered after " +
                            earlier.what + " on queue " + std::to_string(earlier.queue));
  }
}

void Checker::read(std::uint64_t cell, int queue, std::uint32_t tick, const Clock& clock, const char* what) {
  Cell& state = cells_[cell];
  require(state.writer, clock, cell, "reads", what);
  for (Access& reader : state.readers) {
    if (reader.queue == queue) {
      reader = {queue, tick, what};
      return;
    }
  }
  state.readers.push_back({queue, tick, what});
}

void Checker::write(std::uint64_t cell, int queue, std::uint32_t tick, const Clock& clock, const char* what) {
  Cell& state = cells_[cell];
  require(state.writer, clock, cell, "writes", what);
  for (const Access& reader : state.readers) {
    require(reader, clock, cell, "writes", what);
  }
  state.writer = {queue, tick, what};
  state.readers.clear();
}

}  // namespace actckpt::sim
