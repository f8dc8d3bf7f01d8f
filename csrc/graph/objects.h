// The graph that a region records (NOTE [ Lineage ] in actckpt/_replay/lineage.py), as plain C objects: they are
// created for every operator and every saved tensor of a forward.
//
// Guarded by the GIL. Only tapes take part in garbage collection. All other references point one way, from a handle to
// what it is made from, and only autograd's graph holds the handles.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/numerics.h"
#include "core/python.h"
#include "core/saved_identity.h"

namespace actckpt::replay {

struct HandleObject;
struct ValueObject;

// Cached values of a region. Shared by its tape, the cached values (which may outlive it), and the backwards that they
// are cached for.
struct CachedBytes {
  long long references = 0;
  long long bytes = 0;
  std::vector<ValueObject*> values;  // with cached bytes; borrowed
  std::vector<long long> tasks;      // running backwards, whose ends release them
  // The value that was loaded beyond the limit; evicted at the next load.
  ValueObject* over_budget_entry = nullptr;
};

// The saved tensors on a value, in the order of saving; borrowed, null if dead. Not a list of weak references:
// allocating tracked objects for every saved tensor triggers the garbage collector, which walks the heap.
struct Handles {
  HandleObject** many;  // null: in `few`
  HandleObject* few[2];
  int size;
  int room;  // capacity of `many`

  HandleObject** begin() noexcept { return many != nullptr ? many : few; }
  HandleObject** end() noexcept { return begin() + size; }
};

// The bytes of one storage at one version. Null object fields read as None in Python.
struct ValueObject {
  PyObject_HEAD PyObject* weak_references;
  PyObject* device;
  PyObject* step;
  PyObject* suspended;  // see suspended_steps.h; null reads as None too
  PyObject* operator_;
  PyObject* action;
  PyObject* choice;  // of the region that made it; null: a placeholder
  PyObject* held;
  PyObject* root;
  PyObject* stored;
  PyObject* cached;
  PyObject* candidate_tensor;
  PyObject* why_opaque;
  PyObject* entry;
  // This and the next three are its place (record/module_calls.h); null: places are unused, or no recorded operator
  // made it.
  PyObject* module;
  long long call;
  long long occurrence;
  long long result;
  long long num_reads;  // arguments of recorded calls that are on it
  Handles handles;
  long long nbytes;
  long long ordinal;
  long long index;
  long long version;
  long long cached_task;
  long long cached_version;
  long long key;
  CachedBytes* cached_in;    // null: nothing was ever cached
  std::size_t cached_place;  // index in its list
  // What backward `counted_task` still needs of it (needs.h): how often values that must be replayed read it, whether
  // it is such a value, and the range of clocks of saving and making for these reads.
  long long counted_task;
  long long num_readers;
  long long first_use;
  long long last_use;
  // The last backward that repeated the collectives that it depends on (replay/repeated_collectives.h).
  long long repeated_task;
  char is_reading;
  char is_repeated;       // made by a collective that is replayed
  char needs_collective;  // it is such a value, or may depend on one
  char was_saved;         // its action is decided
  char is_needed;
  char is_input;
  char is_parameter;
  char is_made;  // a recorded operator made the storage
};

// One recorded call of an operator.
struct StepObject {
  PyObject_HEAD PyObject* operator_;
  PyObject* args;
  PyObject* kwargs;
  PyObject* inputs;
  PyObject* outputs;                            // weak references; null: none
  std::vector<std::pair<long, long>>* results;  // of each output: kind and index, see `add_output`; null: none
  PyObject* written;                            // null: none
  PyObject* random;
  PyObject* numerics;  // the settings under which it ran; see core/numerics.h
  char grad_enabled;
};

// A storage that the recorder knows.
struct KnownStorageObject {
  PyObject_HEAD PyObject* storage;  // a weak reference
  PyObject* value;
};

constexpr int kFewDims = 4;

// A tensor as geometry on a value.
struct WindowObject {
  PyObject_HEAD PyObject* value;
  PyObject* dtype;
  std::int64_t* dims;  // sizes, then strides; null: in `few`
  std::int64_t few[2 * kFewDims];
  long long offset;
  int num_dims;
  char is_conj;
  char is_neg;
};

// A saved tensor: a window on a value.
struct HandleObject {
  PyObject_HEAD PyObject* weak_references;
  PyObject* tape;
  PyObject* window;
  PyObject* alias;          // a tensor equal to the window, if one is held; else null
  SavedIdentity* original;  // null: see core/saved_identity.h
  PyObject* audit;
  ValueObject* listed_on;  // borrowed; cleared when one of the two dies
  HandleObject* previous;  // on its tape, in the order of saving
  HandleObject* next;
  long long task;
  long long clock;  // number of values of the region when it was saved
};

// One row of a report about a saved value.
struct EntryObject {
  PyObject_HEAD PyObject* operator_;  // its name
  PyObject* module;
  PyObject* action;
  PyObject* why;
  PyObject* storage;  // a weak reference
  long long nbytes;
  long long num_replays;
  long long call;
  long long occurrence;  // -1: no place
  long long result;
};

// Facts about a policy that the recorder reads at every operator.
struct ChoiceFacts {
  PyObject* actions;         // by name; None: by place
  PyObject* default_action;  // for all others
  char are_known;
  char asks_calls;
};

// The part of a tape that the recorder uses at every operator; actckpt/_replay/tape.py derives from it.
struct TapeObject {
  PyObject_HEAD PyObject* storages;
  PyObject* holding;
  PyObject* saved;
  PyObject* choice;
  ChoiceFacts choice_facts;
  PyObject* lock;           // held while its values are replayed
  PyObject* replay_order;   // of `configure`, or None
  PyObject* modules;        // of its site
  PyObject* opaque_places;  // of its site
  PyObject* audited_places;
  PyObject* opaque_names;
  PyObject* entries;
  PyObject* outer;  // the outer hooks, or None
  // Storages of the positional arguments, by id. None: the outer hooks get leaves too, like all inputs.
  PyObject* argument_storages;
  PyObject* meter;  // counts the live bytes of its values, or None
  PyObject* candidates;
  PyObject* calls;             // see record/module_calls.h; None: places are unused
  HandleObject* first_handle;  // the first live one; borrowed, handles hold the tape
  HandleObject* last_handle;
  CachedBytes* cached;     // null: nothing was ever cached
  long long window_bytes;  // limit for cached bytes in this backward; -1: none
  long long counted_task;  // see `count_needs`
  long long num_lost;
  // Of `holding` and `candidates`, without parameters, when they were last examined (record/candidates.h).
  long long held_bytes;
  long long new_held_bytes;         // added since
  long long num_examined;           // values that were looked at then
  long long values_at_examination;  // `num_values` then
  long long swap;  // the swap during whose rerun it was made; -1: no operator needs a swap for its replay
  long long recompute_bytes;
  long long opaque_bytes;
  long long structure;
  long long num_values;
  long long num_packed;
  long long num_unversioned_args;  // tensor arguments without a version counter
  PyObject* why_unversioned;       // of the last of them
  PyObject* why_opaque;            // why no result made here may be replayed; None: it may
  long long began_at;              // autograd's next sequence number at opening
  char is_open;
  char is_audited;
  char audits_always;
  char has_windows;   // each backward starts without a limit, and may get one
  char repeats;       // some of its values are made by repeated collectives (replay/repeated_collectives.h)
  char is_repeating;  // one of these may run now
};

extern PyTypeObject* value_type;
extern PyTypeObject* step_type;
extern PyTypeObject* known_storage_type;
extern PyTypeObject* window_type;
extern PyTypeObject* handle_type;
extern PyTypeObject* entry_type;
extern PyTypeObject* tape_type;

inline bool is_none(PyObject* object) { return object == nullptr || object == Py_None; }

// Untracks one of our containers, which cannot be part of a cycle. Collections triggered by a training step would
// otherwise walk through thousands of them.
inline PyObject* untracked(PyObject* container) noexcept {
  if (container != nullptr) PyObject_GC_UnTrack(container);
  return container;
}

// A zeroed object.
template <typename Object>
Object* allocated(PyTypeObject* type) {
  PyObject* object = type->tp_alloc(type, 0);  // zeroed
  if (object == nullptr) throw py::error_already_set();
  return reinterpret_cast<Object*>(object);
}

// Replaces the object in a field.
void assign(PyObject*& field, PyObject* object) noexcept;

void append(PyObject* list, PyObject* item);

inline PyObject* as_object(ValueObject* value) noexcept { return reinterpret_cast<PyObject*>(value); }
inline ValueObject* as_value(py::handle object) noexcept { return reinterpret_cast<ValueObject*>(object.ptr()); }
inline StepObject* as_step(py::handle object) noexcept { return reinterpret_cast<StepObject*>(object.ptr()); }
inline TapeObject* as_tape(py::handle object) noexcept { return reinterpret_cast<TapeObject*>(object.ptr()); }

py::object new_value(long long nbytes, PyObject* device, long long ordinal);
// A call under the current settings.
py::object new_step(PyObject* op, Numerics which, py::object args, py::object kwargs, py::object inputs);
py::object new_known_storage(PyObject* storage, PyObject* value);
py::object new_handle(PyObject* tape, PyObject* window);

// Adds a row for `value`, whose bytes `tensor` shows, to the report of its region; returns it, borrowed.
EntryObject* add_entry(TapeObject* tape, ValueObject* value, PyObject* tensor);

// Makes `value` a result of `step`: `kind` 0, the index-th returned tensor; 1, the index-th written value.
void add_output(StepObject* step, ValueObject* value, long kind, long index);

// The referent of a weak reference, null if dead; borrowed from whoever holds it.
PyObject* referent(PyObject* reference) noexcept;

// Removes the handle from the list of its tape.
void unlist(HandleObject* handle) noexcept;

// Drops a reference to a list of cached values.
void release(CachedBytes* cached) noexcept;

// Adds a value to its list of cached values, and removes it.
void list_cached(ValueObject* value);
void unlist_cached(ValueObject* value) noexcept;

// Adds `handle` to the handles of `value`.
void add_handle(ValueObject* value, PyObject* handle);

// Removes a handle that died, or that will refer to another value.
void forget_handle(HandleObject* handle) noexcept;

// Whether a saved tensor on `value` is alive.
bool has_saved_tensors(ValueObject* value) noexcept;

// Whether a live saved tensor on `value` was not unpacked in backward `task`.
bool is_pending(ValueObject* value, long long task) noexcept;

}  // namespace actckpt::replay
