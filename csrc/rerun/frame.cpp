#include "rerun/recomputed_values.h"

#include <structmember.h>  // T_PYSSIZET, READONLY; the new names exist from Python 3.12 on

#include <algorithm>
#include <new>
#include <unordered_set>
#include <utility>

#include "core/collected.h"
#include "core/python.h"
#include "core/reads.h"
#include "core/released.h"
#include "core/task_end.h"
#include "rerun/parameters.h"

namespace actckpt {

PyTypeObject* frame_type = nullptr;
PyTypeObject* slot_type = nullptr;

namespace {

// Capacity reserved for saved tensors at once.
constexpr std::size_t kFewSaved = 8;

FrameObject* frame_of(PyObject* self) { return reinterpret_cast<FrameObject*>(self); }

// Frames that hold rerun values; borrowed.
std::unordered_set<FrameObject*>& frames_with_values() {
  static auto* frames = new std::unordered_set<FrameObject*>();
  return *frames;
}

bool same_key(PyObject* a, PyObject* b) noexcept {
  if (a == b) return true;
  if (!PyLong_CheckExact(a) || !PyLong_CheckExact(b)) return false;
  return PyLong_AsLongLong(a) == PyLong_AsLongLong(b);
}

void slot_dealloc(PyObject* self) {
  auto* slot = reinterpret_cast<SlotObject*>(self);
  FrameObject* frame = slot->frame;
  const std::size_t index = slot->index;
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
  frame->saved[index].slot = nullptr;
  frame->num_live -= 1;
  // Nobody can unpack this value any more: free it now, not with the graph task. Freeing a tensor can run Python, so do
  // not touch the frame after an object was released.
  std::vector<py::object> released;
  for (auto& values : frame->values) {
    if (index >= values->slots.size()) continue;
    RecomputedValue& value = values->slots[index];
    value.state = RecomputedValue::State::kTaken;
    if (value.tensor) released.push_back(std::move(value.tensor));
  }
  released.clear();
  Py_DECREF(reinterpret_cast<PyObject*>(frame));
}

SlotObject* new_slot(FrameObject* frame, std::size_t index) {
  SlotObject* slot = PyObject_New(SlotObject, slot_type);
  if (slot == nullptr) throw py::error_already_set();
  Py_INCREF(reinterpret_cast<PyObject*>(frame));
  slot->frame = frame;
  slot->index = index;
  return slot;
}

int frame_clear(PyObject* self) {
  const std::shared_ptr<Parameters> parameters = std::move(frame_of(self)->context.parameters);
  return collected::clear<FrameObject>(self);
}

void frame_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  FrameObject* frame = frame_of(self);
  if (frame->weakrefs != nullptr) PyObject_ClearWeakRefs(self);
  using SavedVector = std::vector<Saved>;
  using ValuesVector = std::vector<std::unique_ptr<Values>>;
  frames_with_values().erase(frame);
  frame->values.~ValuesVector();
  frame->saved.~SavedVector();
  frame->context.~RecomputeContext();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// This thread's observer of the tensors that forwards save; null: none.
thread_local PyObject* observer = nullptr;

PyObject* frame_pack(PyObject* self, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    FrameObject* frame = frame_of(self);
    Saved saved;
    saved.version = version_of(tensor);
    if (frame->check_metadata) {
      saved.shape = shape_of(tensor);
      saved.dtype = reads().dtype(tensor);
      saved.device = reads().device(tensor);
    }
    if (frame->check_metadata && !reads().requires_grad.is_true(tensor)) {
      PyObject* reference = PyWeakref_NewRef(tensor, nullptr);
      if (reference == nullptr) throw py::error_already_set();
      saved.external_tensor = py::reinterpret_steal<py::object>(reference);
    }
    if (observer != nullptr) {
      const auto function = py::reinterpret_borrow<py::object>(observer);
      owned(PyObject_CallOneArg(function.ptr(), tensor));
    }
    call_audit(frame, names().note, frame->saved.size(), tensor);
    SlotObject* slot = saved.slot = new_slot(frame, frame->saved.size());
    frame->saved.push_back(std::move(saved));
    frame->num_live += 1;
    return reinterpret_cast<PyObject*>(slot);
  });
}

PyObject* frame_metadata(PyObject* self, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    const std::size_t index = PyLong_AsSize_t(argument);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (index >= frame_of(self)->saved.size()) throw py::index_error("no such saved tensor");
    const Saved& saved = frame_of(self)->saved[index];
    if (!saved.shape) return Py_NewRef(Py_None);
    return py::make_tuple(saved.shape, saved.dtype, saved.device).release().ptr();
  });
}

PyObject* frame_num_saved(PyObject* self, void*) { return PyLong_FromSize_t(frame_of(self)->saved.size()); }

PyObject* frame_num_live(PyObject* self, void*) { return PyLong_FromSize_t(frame_of(self)->num_live); }

PyObject* frame_num_held(PyObject* self, void*) {
  std::size_t count = 0;
  for (const auto& values : frame_of(self)->values) {
    for (const RecomputedValue& value : values->slots) count += value.tensor ? 1 : 0;
  }
  return PyLong_FromSize_t(count);
}

PyObject* or_none(const py::object& object) { return Py_NewRef(object ? object.ptr() : Py_None); }

PyObject* frame_function(PyObject* self, void*) { return or_none(frame_of(self)->context.function); }
PyObject* frame_args(PyObject* self, void*) { return or_none(frame_of(self)->context.args); }
PyObject* frame_region(PyObject* self, void*) { return or_none(frame_of(self)->context.region); }
PyObject* frame_state(PyObject* self, void*) { return or_none(frame_of(self)->context.state); }
PyObject* frame_random(PyObject* self, void*) { return or_none(frame_of(self)->context.random); }
PyObject* frame_buffers(PyObject* self, void*) { return or_none(frame_of(self)->context.buffers); }

PyObject* frame_parameters(PyObject* self, void*) {
  return guarded([&] { return py::cast(frame_of(self)->context.parameters).release().ptr(); });
}

PyObject* frame_may_audit(PyObject* self, void*) { return PyBool_FromLong(frame_of(self)->context.may_audit ? 1 : 0); }

PyObject* frame_metadata_is_checked(PyObject* self, void*) {
  return PyBool_FromLong(frame_of(self)->check_metadata ? 1 : 0);
}

PyMethodDef frame_methods[] = {
    {"pack", frame_pack, METH_O, "Pack hook of the forward: note the tensor, return its slot."},
    {"metadata", frame_metadata, METH_O, "metadata(index): (shape, dtype, device) or None."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef frame_getset[] = {
    {"num_saved", frame_num_saved, nullptr, "Tensors that the forward saved.", nullptr},
    {"num_live", frame_num_live, nullptr, "Of these, how many autograd still holds.", nullptr},
    {"num_held", frame_num_held, nullptr, "Values of reruns held at the moment.", nullptr},
    {"metadata_is_checked", frame_metadata_is_checked, nullptr, "determinism_check.", nullptr},
    {"may_audit", frame_may_audit, nullptr, "Whether a rerun gets the bytes of the forward's inputs.", nullptr},
    {"function", frame_function, nullptr, "The region's function.", nullptr},
    {"args", frame_args, nullptr, "Held positional arguments; None: the region holds them.", nullptr},
    {"region", frame_region, nullptr, "Python's Region, or None.", nullptr},
    {"buffers", frame_buffers, nullptr, "Buffers of the function's modules, or None.", nullptr},
    {"parameters", frame_parameters, nullptr, "Parameters of the function.", nullptr},
    {"state", frame_state, nullptr, "Global state of the forward.", nullptr},
    {"random", frame_random, nullptr, "GeneratorStates that reruns swap in, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef frame_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(FrameObject, weakrefs), READONLY, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};

PyType_Slot frame_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(frame_dealloc)},
                             {Py_tp_traverse, reinterpret_cast<void*>(collected::traverse<FrameObject>)},
                             {Py_tp_clear, reinterpret_cast<void*>(frame_clear)},
                             {Py_tp_methods, frame_methods},
                             {Py_tp_getset, frame_getset},
                             {Py_tp_members, frame_members},
                             {Py_tp_doc, const_cast<char*>("Saved tensors of one region.")},
                             {0, nullptr}};
PyType_Spec frame_spec = {"actckpt._C.Frame", sizeof(FrameObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_GC, frame_slots};

PyType_Slot slot_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(slot_dealloc)},
                            {Py_tp_doc, const_cast<char*>("What autograd holds instead of a tensor.")},
                            {0, nullptr}};
PyType_Spec slot_spec = {"actckpt._C.Slot", sizeof(SlotObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slot_slots};

}  // namespace

Values* FrameObject::find(PyObject* key) noexcept {
  for (auto& entry : values) {
    if (same_key(entry->key.ptr(), key)) return entry.get();
  }
  return nullptr;
}

void FrameObject::drop(PyObject* key) noexcept {
  const auto found =
      std::find_if(values.begin(), values.end(), [&](const auto& entry) { return same_key(entry->key.ptr(), key); });
  if (found == values.end()) return;
  const std::unique_ptr<Values> dropped = std::move(*found);  // freed once the vector is consistent
  values.erase(found);
  if (values.empty()) frames_with_values().erase(this);
}

py::object new_frame(RecomputeContext context, bool check_metadata) {
  PyObject* self = frame_type->tp_alloc(frame_type, 0);  // zeroed
  if (self == nullptr) throw py::error_already_set();
  FrameObject* frame = frame_of(self);
  new (&frame->context) RecomputeContext(std::move(context));
  new (&frame->saved) std::vector<Saved>();
  frame->saved.reserve(kFewSaved);
  new (&frame->values) std::vector<std::unique_ptr<Values>>();
  frame->check_metadata = check_metadata;
  return py::reinterpret_steal<py::object>(self);
}

namespace {

// The tensor of a weak reference, null if it is dead.
py::object alive(const py::object& reference) {
  py::object tensor = call(reference.ptr());
  return tensor.is_none() ? py::object() : tensor;
}

}  // namespace

void complete_forward(FrameObject* frame) {
  frame->forward_completed = true;
  for (Saved& saved : frame->saved) {
    if (!saved.external_tensor) continue;
    const py::object tensor = alive(saved.external_tensor);
    if (tensor) {
      saved.external_tensor_version = version_of(tensor.ptr());
    } else {
      saved.external_tensor = py::object();
    }
  }
}

std::vector<long long> external_tensor_versions(const FrameObject* frame) {
  std::vector<long long> versions;
  for (std::size_t i = 0; i < frame->saved.size(); ++i) {
    if (!frame->saved[i].external_tensor) continue;
    const py::object tensor = alive(frame->saved[i].external_tensor);
    if (!tensor) continue;
    versions.resize(frame->saved.size(), -1);
    versions[i] = version_of(tensor.ptr());
  }
  return versions;
}

bool is_changed_external_tensor(const Saved& saved, PyObject* tensor, long long version_at_start) {
  return version_at_start != -1 && version_at_start != saved.external_tensor_version &&
         alive(saved.external_tensor).ptr() == tensor;
}

py::object pack_of(const py::object& frame) { return owned(PyCFunction_New(&frame_methods[0], frame.ptr())); }

namespace {

// Moves the tensors that nobody has unpacked yet from `values` to `gone`.
void release(Values* values, std::vector<py::object>* gone) {
  values->is_released = true;
  for (RecomputedValue& value : values->slots) {
    if (value.state != RecomputedValue::State::kHeld) continue;
    value.state = RecomputedValue::State::kMissing;
    gone->push_back(std::move(value.tensor));
  }
}

// The last operator of a rerun may not have filled what it saved: the next rerun runs that operator too.
void rerun_to_the_end(FrameObject* frame, Values* values) {
  frame->context.early_stop = false;
  std::vector<py::object> gone;  // freed last: that can run Python
  release(values, &gone);
}

// Whether `index` can be taken from `values`. If it was taken before, it is read a second time in one backward; the
// next rerun then keeps its values.
bool holds(const Values* values, std::size_t index) {
  return values != nullptr && index < values->slots.size() &&
         values->slots[index].state == RecomputedValue::State::kHeld;
}

}  // namespace

py::object take(FrameObject* frame, std::size_t index, PyObject* key) {
  Values* values = frame->find(key);
  if (!holds(values, index)) return {};
  if (index >= values->first_of_last && !values->slots[index].needs_grad) {
    const bool is_filled = call(names().reads_filled_late).ptr() == Py_False;
    values = frame->find(key);  // Python ran: another thread may have dropped them
    if (!holds(values, index)) return {};
    if (!is_filled) {
      rerun_to_the_end(frame, values);
      return {};
    }
  }
  RecomputedValue& value = values->slots[index];
  py::object tensor = value.tensor;
  const VersionCheck version_check = value.version_check;
  if (!values->keep) {
    value.tensor = py::object();
    value.state = RecomputedValue::State::kTaken;
  }
  long long found = 0, expected = 0;
  if (version_check.is_changed(tensor.ptr(), &found, &expected)) {
    PyObject* error = PyObject_CallFunction(names().modified_error, "OnOLL", reinterpret_cast<PyObject*>(frame),
                                            static_cast<Py_ssize_t>(index), tensor.ptr(), found, expected);
    if (error == nullptr) throw py::error_already_set();
    raise(py::reinterpret_steal<py::object>(error));
  }
  return tensor;
}

void store(FrameObject* frame, std::unique_ptr<Values> values) {
  const py::object key = values->key;
  frame->drop(key.ptr());
  frame->values.push_back(std::move(values));
  frames_with_values().insert(frame);
  const bool is_of_task = PyLong_CheckExact(key.ptr());
  const long long task = PyLong_AsLongLong(is_of_task ? key.ptr() : call(names().graph_task_id).ptr());
  if (task == -1) return;
  PyObject* made = PyWeakref_NewRef(reinterpret_cast<PyObject*>(frame), nullptr);
  if (made == nullptr) throw py::error_already_set();
  at_task_end(task, [reference = py::reinterpret_steal<py::object>(made), key, is_of_task](TaskResult result) {
    if (!is_of_task && result == TaskResult::kDone) return;  // later backwards of the group use the values
    const py::object alive = call(reference.ptr());
    if (!alive.is_none()) frame_of(alive.ptr())->drop(key.ptr());
  });
}

bool was_released(FrameObject* frame, PyObject* key) noexcept {
  const Values* values = frame->find(key);
  return values != nullptr && values->is_released;
}

namespace {

// release_rerun_values(nbytes) -> released bytes
PyObject* release_rerun_values(PyObject*, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    Released released(argument);
    // Strong references: freeing the values of one frame may free another.
    std::vector<py::object> frames;
    for (FrameObject* frame : frames_with_values()) {
      frames.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame)));
    }
    for (const py::object& frame : frames) {
      if (released.is_enough()) break;
      std::vector<py::object> gone;
      for (const auto& values : frame_of(frame.ptr())->values) release(values.get(), &gone);
      released.free(std::move(gone));
    }
    return PyLong_FromLongLong(released.nbytes());
  });
}

// set_saved_tensor_observer(function or None) -> the previous one
PyObject* set_saved_tensor_observer(PyObject*, PyObject* function) {
  PyObject* before = std::exchange(observer, function == Py_None ? nullptr : Py_NewRef(function));
  return before == nullptr ? Py_NewRef(Py_None) : before;
}

PyMethodDef frame_functions[] = {{"release_rerun_values", release_rerun_values, METH_O,
                                  "release_rerun_values(nbytes) -> released bytes of what reruns brought back."},
                                 {"set_saved_tensor_observer", set_saved_tensor_observer, METH_O,
                                  "Call a function with each tensor that forwards of regions save in this thread."},
                                 {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_frame_types(py::module_& module) {
  frame_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&frame_spec));
  if (frame_type == nullptr) throw py::error_already_set();
  slot_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&slot_spec));
  if (slot_type == nullptr) throw py::error_already_set();
  module.add_object("Frame", reinterpret_cast<PyObject*>(frame_type));
  module.add_object("Slot", reinterpret_cast<PyObject*>(slot_type));
  if (PyModule_AddFunctions(module.ptr(), frame_functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
