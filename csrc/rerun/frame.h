// Bookkeeping of one checkpointed region: which tensors its forward saved, and the values that
// reruns brought back for them.
//
// A Frame is made per region. Its `pack` is the pack hook of the forward: it keeps nothing of the
// tensor but its metadata and hands autograd a Slot. `unpack` is the unpack hook: it answers from
// the values of the current backward, or reruns the region (region.h), which fills them through a
// Refill (refill.h). Plain CPython types instead of pybind11 classes, because these calls run once
// per saved tensor and a vectorcall costs a third of a bound method of pybind11.
//
// Thread rule: everything here runs with the GIL held. Ownership: autograd owns Slots, a Slot owns
// its Frame, a Frame owns what its reruns need and never a Slot. So when autograd releases the
// last saved tensor of a region, everything the region held is freed at once.
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

// A value that a rerun brought back, for one backward.
struct Refilled {
  enum class State { kMissing, kHeld, kTaken };

  py::object tensor;
  VersionCheck version_check;  // of the tensor when it was saved
  State state = State::kMissing;
  bool needs_grad = false;
};

// All values that one rerun brought back. Belongs to one graph task or GraphExecGroup.
struct Values {
  py::object key;            // int: id of the graph task; else the GraphExecGroup
  bool keep = false;         // values stay after their first unpack: something reads them twice
  bool is_released = false;  // those not asked for yet were given back to make room; a rerun brings them back
  // The rerun ended inside of an operator, which saved the tensors from this index on and may not have run. Of these,
  // one that the operator had yet to fill is brought back by a rerun that goes to the end.
  std::size_t first_of_last = SIZE_MAX;
  std::vector<Refilled> slots;
};

// What the forward noted of one saved tensor.
struct Saved {
  py::object shape, dtype, device;  // null where the determinism check is off
  long long version = 0;
  SlotObject* slot = nullptr;  // borrowed; null once autograd released it
  // Weak reference to a tensor that outlives the forward and has no gradient (a mask that a module
  // holds, say), and its version then. Null for all others.
  py::object external_tensor;
  long long external_tensor_version = 0;
};

// What a rerun of a region needs.
struct RecomputeContext {
  py::object function;
  py::object args;                         // held: what held.h's restore_arguments takes. Null where `region` is set.
  py::object state;                        // global state of the forward, a tuple; null where `region` is set
  py::object random;                       // GeneratorStates of the forward; null: random state is left alone
  py::object region;                       // Python's Region, for all that the fields above cannot say; else null
  py::object lock;                         // threading.RLock: one rerun at a time
  std::shared_ptr<Parameters> parameters;  // of the function; null where `region` is set
  py::object buffers;  // Python's Buffers of the function; null where it has none or `region` is set
  // Reruns restore random state, under the swap lock. The swap within whose rerun the region was
  // made, 0 for none; -1: random state is left alone.
  long long outer_swap = -1;
  bool early_stop = true;
};

struct FrameObject {
  PyObject_HEAD PyObject* weakrefs;
  RecomputeContext recipe;
  std::vector<Saved> saved;
  std::vector<std::unique_ptr<Values>> values;
  std::size_t num_live;  // slots that autograd still holds
  bool check_metadata;
  bool forward_completed;

  Values* find(PyObject* key) noexcept;
  void drop(PyObject* key) noexcept;
};

// Not what reruns brought back: it goes with its backward.
template <typename Visit>
void for_each_reference(FrameObject& frame, const Visit& visit) {
  RecomputeContext& recipe = frame.recipe;
  for (py::object* field :
       {&recipe.function, &recipe.args, &recipe.state, &recipe.random, &recipe.region, &recipe.lock, &recipe.buffers}) {
    visit(field->ptr());
  }
  if (recipe.parameters.use_count() == 1) for_each_reference(*recipe.parameters, visit);
}

struct SlotObject {
  PyObject_HEAD FrameObject* frame;  // owned
  std::size_t index;
};

extern PyTypeObject* frame_type;
extern PyTypeObject* slot_type;

py::object new_frame(RecomputeContext recipe, bool check_metadata);

// Ends the forward: from now on, external tensors must not change.
void complete_forward(FrameObject* frame);

// Whether `tensor`, saved again at `index`, is an external tensor that was changed in place meanwhile.
bool is_changed_external_tensor(const Saved& saved, PyObject* tensor, long long version_at_start);

// Versions of the external tensors as a rerun finds them, by index; -1 where there is none.
std::vector<long long> external_tensor_versions(const FrameObject* frame);

// Pack hook of the forward, as a bound method.
py::object pack_of(const py::object& frame);

// Returns the value of `index` for `key`, or a null object if a rerun is needed. A value leaves
// the frame with its first unpack, unless `keep` was asked for. Throws if the value was changed in
// place since it was saved.
py::object take(FrameObject* frame, std::size_t index, PyObject* key);

// Stores what a rerun brought back, and sees to it that it is dropped when the graph task ends. What belongs to a
// GraphExecGroup is dropped where the graph task fails.
void store(FrameObject* frame, std::unique_ptr<Values> values);

// Whether values of `key` were given back to make room (actckpt/_core/pressure.py).
bool was_released(FrameObject* frame, PyObject* key) noexcept;

void add_frame_types(py::module_& module);

}  // namespace actckpt
