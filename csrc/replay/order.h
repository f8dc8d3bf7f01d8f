// Which steps a replay executes, in which order, and which results stay.
#pragma once

#include <vector>

#include "graph/objects.h"

namespace actckpt::replay {

// Fewer values than this always stay. They are of similar size, so the window cannot be `windows.LEAST_GAIN` times
// smaller, and without this rule none of them would stay.
constexpr long long kFewValues = 4;

struct Plan {
  std::vector<py::object> steps;
  // Values that stay once they are made: this backward needs them again (NOTE [ Needs ]).
  std::vector<py::object> retained;
};

// The steps that `target` depends on, in the order of depth_first.h or of `configure(replay_order=...)`. If not
// everything that is needed again may stay, actckpt/_replay/schedule.py selects what does.
//
// `clock`: when the saved tensor that needs it was saved, 0: unknown.
Plan plan_of(TapeObject* tape, ValueObject* target, long long task, long long clock);

}  // namespace actckpt::replay
