// In which order earlier backwards read what sessions moved.
//
// Rule 1 of NOTE [ Reading ahead ] in actckpt/_offload/reading.py. Thread rule: GIL held.
#pragma once

#include <cstddef>
#include <vector>

namespace actckpt {

// The places of a session's spans in the order in which backward will read them, by the sizes that it moved; null where
// it is not known.
const std::vector<std::size_t>* learnt_order(const std::vector<long long>& sizes);

// Remembers the order of a backward that read all of a session's spans.
void note_order(const std::vector<long long>& sizes, std::vector<std::size_t> places);

}  // namespace actckpt
