// Walks along the graph of NOTE [ Lineage ]: what the replay of a value needs.
#pragma once

#include <vector>

#include "graph/objects.h"

namespace actckpt::replay {

// Additional bytes that must be held so that `value` can be replayed. Stops counting above `at_most`. May exceed it too
// early while candidates wait for the end of the region.
long long new_leaf_bytes(ValueObject* value, long long at_most);

// Records that `value` will be replayed: its inputs are held for it.
void mark_needed(ValueObject* value);

// Whether the bytes of a value are available without executing anything.
bool is_available(const ValueObject* value);

// Adds the inputs of a value's step.
void add_inputs(const ValueObject* value, std::vector<ValueObject*>* pending);

}  // namespace actckpt::replay
