// The orders in which earlier backwards read the spans of sessions.
//
// See NOTE [ Prefetching ] in actckpt/_offload/reading.py. Thread rule: GIL held.
#pragma once

#include <cstddef>
#include <vector>

namespace actckpt {

// The places of a session's spans in the expected order of reading, by the sizes that it offloaded; null if unknown.
const std::vector<std::size_t>* learnt_order(const std::vector<long long>& sizes);

// Records the order of a backward that read all spans of a session.
void note_order(const std::vector<long long>& sizes, std::vector<std::size_t> places);

}  // namespace actckpt
