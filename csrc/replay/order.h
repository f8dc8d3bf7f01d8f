// Which steps a replay executes, in which order, and what stays of what they make.
#pragma once

#include <vector>

#include "graph/objects.h"

namespace actckpt::replay {

// Fewer values than these stay in any case: the window cannot be so many times smaller (`windows.LEAST_GAIN`), as they
// are of about one size, and without it none of them would stay.
constexpr long long kFewValues = 4;

struct Plan {
  std::vector<py::object> steps;
  // Values that stay once they are made: this backward asks for them again (Rule 12 of NOTE [ Replay ]).
  std::vector<py::object> retained;
};

// The steps that lead to `target`, in the order of depth_first.h or of `configure(replay_order=...)`. Where not all
// that is asked for again may stay, actckpt/_replay/schedule.py says what does.
//
// `clock`: when the saved tensor that asks for it was saved, 0: not known.
Plan plan_of(TapeObject* tape, ValueObject* target, long long task, long long clock);

}  // namespace actckpt::replay
