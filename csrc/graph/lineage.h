// What it takes to replay a value: walks along the graph of NOTE [ Lineage ].
#pragma once

#include <vector>

#include "graph/objects.h"

namespace actckpt::replay {

// How many bytes more must be held so that `value` can be replayed, beyond what is needed already. Stops counting above
// `at_most`; may say so too soon while candidates wait for the end of the region.
long long new_leaf_bytes(ValueObject* value, long long at_most);

// Notes that `value` will be replayed: what it is replayed from is held on its account.
void mark_needed(ValueObject* value);

// Whether the bytes of a value can be had without executing anything.
bool is_available(const ValueObject* value);

// Adds what the step of a value reads.
void add_inputs(const ValueObject* value, std::vector<ValueObject*>* pending);

}  // namespace actckpt::replay
