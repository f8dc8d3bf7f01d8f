// Chooses the candidates that a region keeps, so that it holds the fewest bytes: NOTE [ Candidates ] in
// csrc/record/candidates.h.
#pragma once

#include <vector>

#include "graph/objects.h"

namespace actckpt::replay {

// Returns for each candidate whether the minimum cut keeps it. Sets the number of values that it looked at.
std::vector<char> kept_of(const std::vector<ValueObject*>& candidates, long long* num_walked);

// Returns for each candidate whether keeping it may release one of its leaves: only the region refers to the memory of
// the leaf, and no value that the program has and did not save is replayed from it.
std::vector<char> frees_leaves(TapeObject* tape, const std::vector<ValueObject*>& candidates);

// Whether a value is held and only the region refers to its memory.
bool is_unshared(const ValueObject* value);

}  // namespace actckpt::replay
