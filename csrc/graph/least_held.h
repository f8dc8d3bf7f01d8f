// Which of several saved values a region keeps, so that it holds as few bytes as possible: NOTE [ Least held ] in
// actckpt/_replay/candidates.py.
#pragma once

#include <vector>

#include "graph/objects.h"

namespace actckpt::replay {

enum class Verdict : char { recompute, keep, keep_for_others };  // the last: a recomputed one reads it

// A verdict for each candidate: saved values whose bytes are still in hand (`spare`).
std::vector<Verdict> verdicts(const std::vector<ValueObject*>& candidates);

}  // namespace actckpt::replay
