// Bringing spans back: the one that is asked for, and ahead of it those that backward needs next.
//
// See NOTE [ Reading ahead ] in actckpt/_offload/reading.py for the rules. Thread rule: GIL held;
// calls into a store may let it go, so nothing is remembered across them but by index.
#pragma once

#include "offload/span.h"

namespace actckpt {

// Bytes of `span`; blocks on the CPU, never on a device. Begins to read ahead.
py::object fetch(SpanObject* span);

// What this thread moved last, or null.
std::shared_ptr<Record> last_moved();

// `span` is asked for, or gone: it takes no room among what was brought back and waits.
void leave_window(SpanObject* span) noexcept;

// Adds `span` to what `record` moved.
void note_moved(const std::shared_ptr<Record>& record, SpanObject* span);

// Sums since the process began, in bytes and counts.
struct Sums {
  long long offloaded_bytes = 0;
  long long reloaded_bytes = 0;
  long long deduplicated_bytes = 0;
  long long kept_small = 0;
};
Sums& sums();

void add_reading_functions(py::module_& module);

}  // namespace actckpt
