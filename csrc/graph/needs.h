// Which dropped values a backward still needs: NOTE [ Needs ] in actckpt/_replay/lineage.py. All of it is guarded by
// the GIL, and calls no code that could release the GIL half-way.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Counts what backward `task` will need, unless done already: once per backward and region, in linear time.
void count_needs(TapeObject* tape, long long task);

// Whether backward `task` needs a value: a saved tensor on it was not unpacked yet, or a value that reads it must be
// replayed. Outside of a backward nothing is needed again.
bool is_asked(ValueObject* value, long long task) noexcept;

// Caches a replayed value until backward `task` needs it no more, or ends.
void cache(PyObject* tape, ValueObject* value, PyObject* tensor, long long task);

// Releases the cached bytes of a value.
void uncache(ValueObject* value) noexcept;

// The same, although backward `task` still needs it: it will be replayed once more.
void evict(ValueObject* value, long long task);

// Evicts what is cached for saved tensors that backward `task` skipped. Unpacking goes in the reverse order of saving:
// having reached `clock`, it will not need what was saved later.
void evict_leftovers(TapeObject* tape, long long task, long long clock);

// A saved tensor on `value` was unpacked in backward `task`, or died: releases what only that tensor needed.
void release_needs(ValueObject* value, long long task) noexcept;

void add_needs_functions(py::module_& module);

}  // namespace actckpt::replay
