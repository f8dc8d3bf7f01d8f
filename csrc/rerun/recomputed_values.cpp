#include "rerun/recomputed_values.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "core/python.h"
#include "core/reads.h"

namespace actckpt {
namespace {

struct RecomputedValuesObject {
  PyObject_HEAD py::object frame;  // FrameObject
  py::object error;                // the first mismatch
  py::object restored;             // what Python's region returned as inputs of this rerun; null without one
  std::unique_ptr<Values> values;
  std::vector<long long> external_tensors;  // their versions at the start of the rerun
  std::size_t num_packed;
  std::size_t num_needed;  // one past the last slot that autograd still holds
  bool early_stop;
  bool stopped;
};

// Raised from the pack hook once all needed values are there. A BaseException, so that user code with `except
// Exception` around an operator does not catch it.
PyObject* stop_rerun = nullptr;
PyTypeObject* recomputed_type = nullptr;

RecomputedValuesObject* recomputed_of(PyObject* self) { return reinterpret_cast<RecomputedValuesObject*>(self); }

FrameObject* frame_of(RecomputedValuesObject* recomputed) {
  return reinterpret_cast<FrameObject*>(recomputed->frame.ptr());
}

bool equal(const py::object& a, const py::object& b) {
  if (a.ptr() == b.ptr()) return true;
  const int result = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (result < 0) throw py::error_already_set();
  return result != 0;
}

bool same_metadata(const Saved& saved, PyObject* tensor) {
  return equal(saved.shape, shape_of(tensor)) && equal(saved.dtype, reads().dtype(tensor)) &&
         equal(saved.device, reads().device(tensor));
}

// Ends the rerun: the caller returns null to autograd. Not a C++ exception, which would cost more than a small
// operator.
PyObject* stop(RecomputedValuesObject* recomputed) {
  recomputed->stopped = true;
  PyErr_SetObject(stop_rerun, reinterpret_cast<PyObject*>(recomputed));
  return nullptr;
}

// Lets Python make the error while the stack still shows the user's line. Python may decide that it is none (a harmless
// version change). Returns whether it is one.
bool is_mismatch(RecomputedValuesObject* recomputed, std::size_t index, PyObject* tensor, const char* problem) {
  PyObject* error = PyObject_CallFunction(names().mismatch_error, "OnOs", reinterpret_cast<PyObject*>(recomputed),
                                          static_cast<Py_ssize_t>(index), tensor, problem);
  if (error == nullptr) throw py::error_already_set();
  if (error == Py_None) {
    Py_DECREF(error);
    return false;
  }
  recomputed->error = py::reinterpret_steal<py::object>(error);
  return true;
}

py::object detached(PyObject* tensor, bool needs_grad) {
  return needs_grad ? reads().detach(tensor) : py::reinterpret_borrow<py::object>(tensor);
}

// An operator saves at most this many tensors before it runs, one of which it fills.
constexpr std::size_t kSavedBeforeFilled = 2;

PyObject* pack(RecomputedValuesObject* recomputed, PyObject* tensor) {
  // Detached: a value must not keep the rerun's graph alive. The rerun's graph gets the alias too, since user code may
  // run a backward of its own inside the region.
  const bool needs_grad = reads().requires_grad.is_true(tensor);
  py::object value = detached(tensor, needs_grad);
  if (recomputed->stopped) return value.release().ptr();  // user code caught the stop
  FrameObject* frame = frame_of(recomputed);
  const std::size_t index = recomputed->num_packed++;
  if (index >= frame->saved.size()) {
    if (frame->forward_completed && is_mismatch(recomputed, index, tensor, "more")) return stop(recomputed);
    return value.release().ptr();
  }
  const bool is_spent = recomputed->values->slots[index].state == RecomputedValue::State::kTaken;
  if (frame->saved[index].slot != nullptr && !is_spent) {
    // The Python code below may release slots and so change `saved`; use only indices.
    const long long version = version_of(tensor);
    if (frame->check_metadata) {
      if (!same_metadata(frame->saved[index], tensor)) {
        if (is_mismatch(recomputed, index, tensor, "metadata")) return stop(recomputed);
      } else if (version != frame->saved[index].version) {
        if (is_mismatch(recomputed, index, tensor, "version")) return stop(recomputed);
      }
      if (index < recomputed->external_tensors.size() &&
          is_changed_external_tensor(frame->saved[index], tensor, recomputed->external_tensors[index]) &&
          is_mismatch(recomputed, index, tensor, "external_tensor")) {
        return stop(recomputed);
      }
    }
    call_audit(frame, names().note_again, index, tensor);
    RecomputedValue& entry = recomputed->values->slots[index];
    entry.tensor = value;
    entry.version_check = VersionCheck(tensor, version, value.ptr());
    entry.state = RecomputedValue::State::kHeld;
    entry.needs_grad = needs_grad;
  }
  if (recomputed->early_stop && index + 1 >= recomputed->num_needed) {
    recomputed->values->first_of_last = index + 1 - std::min(index + 1, kSavedBeforeFilled);
    return stop(recomputed);
  }
  return value.release().ptr();
}

PyObject* recomputed_pack(PyObject* self, PyObject* tensor) {
  return guarded([&] { return pack(recomputed_of(self), tensor); });
}

PyObject* recomputed_get_frame(PyObject* self, void*) {
  const py::object& frame = recomputed_of(self)->frame;
  return Py_NewRef(frame ? frame.ptr() : Py_None);
}

PyObject* recomputed_get_error(PyObject* self, void*) {
  const py::object& error = recomputed_of(self)->error;
  return Py_NewRef(error ? error.ptr() : Py_None);
}

PyObject* recomputed_get_restored(PyObject* self, void*) {
  const py::object& restored = recomputed_of(self)->restored;
  return Py_NewRef(restored ? restored.ptr() : Py_None);
}

PyObject* recomputed_get_num_packed(PyObject* self, void*) {
  return PyLong_FromSize_t(recomputed_of(self)->num_packed);
}

PyObject* recomputed_get_num_needed(PyObject* self, void*) {
  return PyLong_FromSize_t(recomputed_of(self)->num_needed);
}

PyObject* recomputed_get_has_failed(PyObject* self, void*) {
  return PyBool_FromLong(recomputed_has_failed(py::reinterpret_borrow<py::object>(self)) ? 1 : 0);
}

PyObject* recomputed_run_to_the_end(PyObject* self, PyObject*) {
  recomputed_of(self)->early_stop = false;
  Py_RETURN_NONE;
}

void recomputed_dealloc(PyObject* self) {
  RecomputedValuesObject* recomputed = recomputed_of(self);
  using OwnedValues = std::unique_ptr<Values>;
  using Versions = std::vector<long long>;
  recomputed->external_tensors.~Versions();
  recomputed->values.~OwnedValues();
  recomputed->restored.~object();
  recomputed->error.~object();
  recomputed->frame.~object();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyMethodDef recomputed_methods[] = {
    {"pack", recomputed_pack, METH_O, "Pack hook of the rerun."},
    {"run_to_the_end", recomputed_run_to_the_end, METH_NOARGS, "Do not stop this rerun early."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {{"frame", recomputed_get_frame, nullptr, "The frame of the values.", nullptr},
                        {"error", recomputed_get_error, nullptr, "The first mismatch, or None.", nullptr},
                        {"restored", recomputed_get_restored, nullptr, "Inputs from the region, or None.", nullptr},
                        {"has_failed", recomputed_get_has_failed, nullptr, "Whether anything does not match.", nullptr},
                        {"num_packed", recomputed_get_num_packed, nullptr, "Tensors saved by the rerun.", nullptr},
                        {"num_needed", recomputed_get_num_needed, nullptr, "Tensors the rerun has to save.", nullptr},
                        {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot recomputed_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(recomputed_dealloc)},
                                  {Py_tp_methods, recomputed_methods},
                                  {Py_tp_getset, getset},
                                  {Py_tp_doc, const_cast<char*>("Collects the values of one rerun.")},
                                  {0, nullptr}};
PyType_Spec recomputed_spec = {"actckpt._C.RecomputedValues", sizeof(RecomputedValuesObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, recomputed_slots};

// Values were restored for this key before. Either `index` was taken already: values are read a second time. Or it was
// released under memory pressure: what was taken is not needed any more.
void begin_again(RecomputedValuesObject* recomputed, const Values& former, std::size_t index) {
  const bool was_given_back = former.is_released && index < former.slots.size() &&
                              former.slots[index].state == RecomputedValue::State::kMissing;
  recomputed->values->keep = former.keep || !was_given_back;
  if (recomputed->values->keep) return;
  for (std::size_t i = 0; i < former.slots.size(); ++i) {
    if (former.slots[i].state == RecomputedValue::State::kTaken)
      recomputed->values->slots[i].state = RecomputedValue::State::kTaken;
  }
}

std::size_t count_needed(const FrameObject* frame) {
  std::size_t count = frame->saved.size();
  while (count > 0 && frame->saved[count - 1].slot == nullptr) count -= 1;
  return count;
}

}  // namespace

void call_audit(const FrameObject* frame, PyObject* method, std::size_t index, PyObject* object) {
  if (!frame->context.audit) return;
  const py::object audit = frame->context.audit;
  call_method_with(audit.ptr(), method, number(static_cast<long long>(index)).ptr(), object);
}

py::object new_recomputed(FrameObject* frame, std::size_t index, const py::object& key) {
  RecomputedValuesObject* recomputed = PyObject_New(RecomputedValuesObject, recomputed_type);
  if (recomputed == nullptr) throw py::error_already_set();
  new (&recomputed->frame) py::object(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame)));
  new (&recomputed->error) py::object();
  new (&recomputed->restored) py::object();
  new (&recomputed->values) std::unique_ptr<Values>(std::make_unique<Values>());
  new (&recomputed->external_tensors) std::vector<long long>();
  recomputed->values->key = key;
  recomputed->values->slots.resize(frame->saved.size());
  if (const Values* former = frame->find(key.ptr())) begin_again(recomputed, *former, index);
  recomputed->num_packed = 0;
  recomputed->num_needed = count_needed(frame);
  recomputed->early_stop = frame->context.early_stop;
  recomputed->stopped = false;
  auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(recomputed));
  if (frame->forward_completed) recomputed->external_tensors = external_tensor_versions(frame);
  return owner;
}

py::object recomputed_pack_of(const py::object& recomputed) {
  return owned(PyCFunction_New(&recomputed_methods[0], recomputed.ptr()));
}

namespace {

// TorchScript replaces the exception of a hook by its own error: the pending one may be the stop.
bool is_stop_in_script(PyObject* recomputed) {
  if (!recomputed_of(recomputed)->stopped || PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) return false;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* text = PyObject_Str(value);
  const bool matches = text != nullptr && PyUnicode_Tailmatch(text, names().script_failure, 0, PY_SSIZE_T_MAX, -1) == 1;
  Py_XDECREF(text);
  PyErr_Restore(type, value, traceback);
  return matches;
}

}  // namespace

bool is_stop_of(PyObject* recomputed) {
  if (PyErr_ExceptionMatches(stop_rerun) == 0) return is_stop_in_script(recomputed);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* arguments = PyObject_GetAttrString(value, "args");
  const bool matches =
      arguments != nullptr && PyTuple_GET_SIZE(arguments) == 1 && PyTuple_GET_ITEM(arguments, 0) == recomputed;
  Py_XDECREF(arguments);
  PyErr_Restore(type, value, traceback);
  return matches;
}

PyObject* recomputed_frame(const py::object& recomputed) { return recomputed_of(recomputed.ptr())->frame.ptr(); }

void set_restored(const py::object& recomputed, py::object restored) {
  recomputed_of(recomputed.ptr())->restored = std::move(restored);
}

bool recomputed_found_mismatch(const py::object& recomputed) {
  return static_cast<bool>(recomputed_of(recomputed.ptr())->error);
}

bool recomputed_has_failed(const py::object& object) {
  RecomputedValuesObject* recomputed = recomputed_of(object.ptr());
  if (recomputed->error) return true;
  return !recomputed->stopped && frame_of(recomputed)->forward_completed &&
         recomputed->num_packed < recomputed->num_needed;
}

void store_recomputed(const py::object& object) {
  RecomputedValuesObject* recomputed = recomputed_of(object.ptr());
  store(frame_of(recomputed), std::move(recomputed->values));
}

void close_recomputed(const py::object& object) noexcept {
  RecomputedValuesObject* recomputed = recomputed_of(object.ptr());
  recomputed->stopped = true;
  // Freed here: that can run Python.
  const py::object frame = std::move(recomputed->frame), error = std::move(recomputed->error);
  const py::object restored = std::move(recomputed->restored);
  const std::unique_ptr<Values> values = std::move(recomputed->values);
}

void add_recomputed_type(py::module_& module) {
  recomputed_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&recomputed_spec));
  if (recomputed_type == nullptr) throw py::error_already_set();
  stop_rerun = PyErr_NewExceptionWithDoc("actckpt._C.StopRerun", "Everything that a rerun had to bring back is there.",
                                         PyExc_BaseException, nullptr);
  if (stop_rerun == nullptr) throw py::error_already_set();
  module.add_object("RecomputedValues", reinterpret_cast<PyObject*>(recomputed_type));
  module.add_object("StopRerun", stop_rerun);
}

}  // namespace actckpt
