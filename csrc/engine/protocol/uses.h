// Which streams use the bytes of a ticket; for both halves of DeviceEngine.

#pragma once

#include <algorithm>

#include "engine/protocol/spills.h"

namespace actckpt {

inline bool contains(const Uses& uses, Stream stream) {
  return std::find(uses.begin(), uses.end(), stream) != uses.end();
}

inline void add_use(Uses* uses, Stream stream) {
  if (!contains(*uses, stream)) {
    uses->push_back(stream);
  }
}

constexpr int index(Side side) { return static_cast<int>(side); }

}  // namespace actckpt
