// Which of several saved values a region keeps, so that it holds as few bytes as possible: NOTE [ Candidates ] in
// csrc/record/candidates.h.
#pragma once

#include <vector>

#include "graph/objects.h"

namespace actckpt::replay {

// For each candidate, a saved value whose bytes are still there (`spare`), whether it is kept. Sets how many values it
// looked at.
std::vector<char> kept_of(const std::vector<ValueObject*>& candidates, long long* num_walked);

// For each candidate, whether to keep it may release what it is replayed from: nothing but the region refers to the
// bytes of one of its leaves, and no value that the program has and did not save is replayed from that leaf.
std::vector<char> frees_leaves(TapeObject* tape, const std::vector<ValueObject*>& candidates);

// Whether a value is held, and nothing but the region refers to its bytes.
bool is_unshared(const ValueObject* value);

}  // namespace actckpt::replay
