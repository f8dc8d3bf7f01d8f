// Loading spans: the one that is unpacked, and ahead of it those that backward needs next.
//
// See NOTE [ Prefetching ] in actckpt/_offload/reading.py. Thread rule: GIL held; calls into a store may release it,
// so only indices are kept across them.
#pragma once

#include "offload/span.h"

namespace actckpt {

// Bytes of `span`; blocks on the CPU, never on a device. Starts to prefetch.
py::object fetch(SpanObject* span);

// The record of this thread that offloaded last, or null.
std::shared_ptr<Record> last_moved();

// `span` is unpacked or dead: it does not count as prefetched any more.
void leave_window(SpanObject* span) noexcept;

// Adds `span` to the spans of `record`.
void note_moved(const std::shared_ptr<Record>& record, SpanObject* span);

// Sums since the process started, in bytes and counts.
struct Sums {
  long long offloaded_bytes = 0;
  long long reloaded_bytes = 0;
  long long deduplicated_bytes = 0;
  long long kept_small = 0;
};
Sums& sums();

void add_reading_functions(py::module_& module);

}  // namespace actckpt
