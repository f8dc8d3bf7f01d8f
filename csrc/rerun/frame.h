// Bookkeeping of one checkpointed region: which tensors its forward saved, and the values that reruns restored for
// them.
//
// One Frame per region. Its `pack` is the forward's pack hook: it keeps only metadata of the tensor and returns a Slot
// to autograd. `unpack` is the unpack hook: it returns a value of the current backward, or reruns the region
// (region.h), which adds values through `RecomputedValues` (recomputed_values.h). These are plain CPython types, not
// pybind11 classes: the calls run once per saved tensor, and a vectorcall costs a third of a pybind11 bound method.
//
// Thread rule: GIL held everywhere. Ownership: autograd owns Slots, a Slot owns its Frame, a Frame owns what its reruns
// need, and never a Slot. So when autograd releases the last saved tensor of a region, everything that the region held
// is freed at once.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/version_check.h"

namespace actckpt {

namespace py = pybind11;

class Parameters;
struct SlotObject;

// A value that a rerun restored, for one backward.
struct RecomputedValue {
  enum class State { kMissing, kHeld, kTaken };

  py::object tensor;
  VersionCheck version_check;  // of the saved tensor
  State state = State::kMissing;
  bool needs_grad = false;
};

// All values that one rerun restored. Belongs to one graph task or GraphExecGroup.
struct Values {
  py::object key;            // int: id of the graph task; or the GraphExecGroup
  bool keep = false;         // values stay after their first unpack: something reads them twice
  bool is_released = false;  // the values not yet unpacked were released under memory pressure; a rerun restores them
  // The rerun stopped inside an operator, which saved the tensors from this index on and may not have run. A tensor
  // among these that the operator has yet to fill is restored by a rerun that runs to the end.
  std::size_t first_of_last = SIZE_MAX;
  std::vector<RecomputedValue> slots;
};

// What the forward recorded about one saved tensor.
struct Saved {
  py::object shape, dtype, device;  // null if the determinism check is off
  long long version = 0;
  SlotObject* slot = nullptr;  // borrowed; null once autograd released it
  // Weak reference to a tensor without grad that outlives the forward (for example a mask held by a module), and its
  // version then. Null for all others.
  py::object external_tensor;
  long long external_tensor_version = 0;
};

// What a rerun of a region needs.
struct RecomputeContext {
  py::object function;
  py::object args;                         // the argument of held.h's `restore_arguments`; null if `region` is set
  py::object region;                       // Python's Region, which holds other inputs and adds contexts; else null
  py::object state;                        // global state of the forward, a tuple
  py::object random;                       // GeneratorStates of the forward; null: random state is not restored
  py::object lock;                         // threading.RLock: one rerun at a time
  std::shared_ptr<Parameters> parameters;  // of the function
  py::object buffers;                      // Python's Buffers of the function's modules; null if these have none
  py::object audit;                        // Python's RerunAudit; null: this call is not audited
  bool may_audit = true;                   // false: hooks of others may give other bytes back for its inputs
  // Reruns change what others see (random state, buffers, containers) under the swap lock. The swap during whose rerun
  // the region was made, 0: none; -1: reruns change nothing.
  long long outer_swap = -1;
  bool early_stop = true;
};

struct FrameObject {
  PyObject_HEAD PyObject* weakrefs;
  RecomputeContext context;
  std::vector<Saved> saved;
  std::vector<std::unique_ptr<Values>> values;
  std::size_t num_live;  // slots that autograd still holds
  bool check_metadata;
  bool forward_completed;

  Values* find(PyObject* key) noexcept;
  void drop(PyObject* key) noexcept;
};

// Not the rerun values: they go with their backward.
template <typename Visit>
void for_each_reference(FrameObject& frame, const Visit& visit) {
  RecomputeContext& context = frame.context;
  for (py::object* field : {&context.function, &context.args, &context.state, &context.random, &context.region,
                            &context.lock, &context.buffers, &context.audit}) {
    visit(field->ptr());
  }
  if (context.parameters.use_count() == 1) for_each_reference(*context.parameters, visit);
}

struct SlotObject {
  PyObject_HEAD FrameObject* frame;  // owned
  std::size_t index;
};

extern PyTypeObject* frame_type;
extern PyTypeObject* slot_type;

py::object new_frame(RecomputeContext context, bool check_metadata);

// Ends the forward: from now on, external tensors must not change.
void complete_forward(FrameObject* frame);

// Whether `tensor`, saved again at `index`, is an external tensor that was changed in place since.
bool is_changed_external_tensor(const Saved& saved, PyObject* tensor, long long version_at_start);

// Versions of the external tensors at the start of a rerun, by index; -1 if there is none.
std::vector<long long> external_tensor_versions(const FrameObject* frame);

// Pack hook of the forward, as a bound method.
py::object pack_of(const py::object& frame);

// Returns the value of `index` for `key`, or a null object if a rerun is needed. A value leaves the frame at its first
// unpack, unless `keep` is set. Throws if the value was changed in place since it was saved.
py::object take(FrameObject* frame, std::size_t index, PyObject* key);

// Stores the values of a rerun, and drops them when the graph task ends. Values of a GraphExecGroup are dropped if the
// graph task fails.
void store(FrameObject* frame, std::unique_ptr<Values> values);

// Whether values of `key` were released under memory pressure (actckpt/_core/pressure.py).
bool was_released(FrameObject* frame, PyObject* key) noexcept;

void add_frame_types(py::module_& module);

}  // namespace actckpt
