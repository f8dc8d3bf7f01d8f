// What a backward still asks for of the values that a region dropped: NOTE [ Needs ] in
// actckpt/_replay/lineage.py. All of it is guarded by the GIL, and calls no code that could release it half-way.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Counts what the backward `task` will ask for, unless that was done: once per backward and region, in linear time.
void count_needs(TapeObject* tape, long long task);

// Whether the backward `task` asks for a value: a saved tensor on it was not unpacked yet, or a value that reads it
// must be replayed. Outside of a backward nothing is asked for again.
bool is_asked(ValueObject* value, long long task) noexcept;

// Keeps a replayed value until the backward `task` asks for it no more, or ends (Rule 12 of NOTE [ Replay ]).
void cache(PyObject* tape, ValueObject* value, PyObject* tensor, long long task);

// Releases what is cached for a value.
void uncache(ValueObject* value) noexcept;

// The same where the backward `task` still asks for it: it will be replayed once more.
void evict(ValueObject* value, long long task);

// Evicts what is cached for saved tensors that the backward `task` has passed by. It unpacks in the reverse order of
// saving: it has come to `clock`, and will not ask for what was saved later.
void evict_leftovers(TapeObject* tape, long long task, long long clock);

// A saved tensor on `value` was unpacked in the backward `task`, or is gone: releases what only that needed.
void release_needs(ValueObject* value, long long task) noexcept;

void add_needs_functions(py::module_& module);

}  // namespace actckpt::replay
