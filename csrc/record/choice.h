// What the recorder asks of a policy: the action for what an operator makes.
#pragma once

#include "graph/objects.h"
#include "record/overload.h"

namespace actckpt::replay {

// What is asked of a policy at every operator; read once for each that the tape gets.
const ChoiceFacts& facts_of_choice(TapeObject* tape);

// The action for one result of the operator that runs, None where the policy is no table of places.
py::object table_action(TapeObject* tape, PyObject* op, long long result);

// The action for what an operator makes, None where results have their own.
py::object action_of(TapeObject* tape, const Overload& overload);

// Whether what an operator makes stays, whatever the call: it is never made again.
bool stays_always(TapeObject* tape, const Overload& overload);

// Asks a policy function after the call of an operator.
py::object asked_after_call(PyObject* choice, PyObject* func, PyObject* args, PyObject* kwargs, PyObject* result);

}  // namespace actckpt::replay
