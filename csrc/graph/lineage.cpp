#include "graph/lineage.h"

#include <unordered_set>
#include <vector>

namespace actckpt::replay {
void add_inputs(const ValueObject* value, std::vector<ValueObject*>* pending) {
  PyObject* inputs = reinterpret_cast<StepObject*>(value->step)->inputs;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
    pending->push_back(reinterpret_cast<ValueObject*>(PyList_GET_ITEM(inputs, i)));
  }
}

bool is_available(const ValueObject* value) {
  return !is_none(value->held) || !is_none(value->stored) || !is_none(value->cached);
}

long long new_leaf_bytes(ValueObject* value, long long at_most) {
  long long total = 0;
  std::unordered_set<ValueObject*> seen;
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty() && total <= at_most) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current->is_needed != 0 || !seen.insert(current).second) continue;
    // A value that exceeded the limit before is not walked again: `value` waits for the end of the region too.
    if (current != value && !is_none(current->candidate_tensor) && current->nbytes >= at_most) return at_most + 1;
    if (is_available(current) || is_none(current->step)) {
      // Saved values and parameters are held anyway.
      if (current->is_parameter == 0 && !has_saved_tensors(current)) total += current->nbytes;
    } else {
      add_inputs(current, &pending);
    }
  }
  return total;
}

void mark_needed(ValueObject* value) {
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty()) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current->is_needed != 0) continue;
    current->is_needed = 1;
    if (!is_available(current) && !is_none(current->step)) add_inputs(current, &pending);
  }
}

}  // namespace actckpt::replay
