// The recorder's queries to a policy: the action for an operator's results.
#pragma once

#include "graph/objects.h"
#include "record/overload.h"

namespace actckpt::replay {

// The facts about the tape's policy; read once per policy.
const ChoiceFacts& facts_of_choice(TapeObject* tape);

// The action for one result of the current operator, None if the policy is not a table of places.
py::object table_action(TapeObject* tape, PyObject* op, long long result);

// The action for all results of an operator, None if each result has its own.
py::object action_of(TapeObject* tape, const Overload& overload);

// Whether an operator's results are kept whatever the call, so that they are never replayed.
bool stays_always(TapeObject* tape, const Overload& overload);

// Queries a policy function after an operator call.
py::object asked_after_call(PyObject* choice, PyObject* func, PyObject* args, PyObject* kwargs, PyObject* result);

}  // namespace actckpt::replay
