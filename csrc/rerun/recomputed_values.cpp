#include "rerun/refill.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "core/python.h"
#include "core/reads.h"

namespace actckpt {
namespace {

struct RefillObject {
  PyObject_HEAD py::object frame;  // FrameObject
  py::object error;                // the first mismatch
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
PyTypeObject* refill_type = nullptr;

RefillObject* refill_of(PyObject* self) { return reinterpret_cast<RefillObject*>(self); }

FrameObject* frame_of(RefillObject* refill) { return reinterpret_cast<FrameObject*>(refill->frame.ptr()); }

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
PyObject* stop(RefillObject* refill) {
  refill->stopped = true;
  PyErr_SetObject(stop_rerun, reinterpret_cast<PyObject*>(refill));
  return nullptr;
}

// Lets Python make the error while the stack still shows the user's line. Python may decide that it is none (a harmless
// version change). Returns whether it is one.
bool is_mismatch(RefillObject* refill, std::size_t index, PyObject* tensor, const char* problem) {
  PyObject* error = PyObject_CallFunction(names().mismatch_error, "OnOs", reinterpret_cast<PyObject*>(refill),
                                          static_cast<Py_ssize_t>(index), tensor, problem);
  if (error == nullptr) throw py::error_already_set();
  if (error == Py_None) {
    Py_DECREF(error);
    return false;
  }
  refill->error = py::reinterpret_steal<py::object>(error);
  return true;
}

py::object detached(PyObject* tensor, bool needs_grad) {
  return needs_grad ? reads().detach(tensor) : py::reinterpret_borrow<py::object>(tensor);
}

// An operator saves at most this many tensors before it runs, one of which it fills.
constexpr std::size_t kSavedBeforeFilled = 2;

PyObject* pack(RefillObject* refill, PyObject* tensor) {
  // Detached: a value must not keep the rerun's graph alive. The rerun's graph gets the alias too, since user code may
  // run a backward of its own inside the region.
  const bool needs_grad = reads().requires_grad.is_true(tensor);
  py::object value = detached(tensor, needs_grad);
  if (refill->stopped) return value.release().ptr();  // user code caught the stop
  FrameObject* frame = frame_of(refill);
  const std::size_t index = refill->num_packed++;
  if (index >= frame->saved.size()) {
    if (frame->forward_completed && is_mismatch(refill, index, tensor, "more")) return stop(refill);
    return value.release().ptr();
  }
  const bool is_spent = refill->values->slots[index].state == Refilled::State::kTaken;
  if (frame->saved[index].slot != nullptr && !is_spent) {
    // The Python code below may release slots and so change `saved`; use only indices.
    const long long version = version_of(tensor);
    if (frame->check_metadata) {
      if (!same_metadata(frame->saved[index], tensor)) {
        if (is_mismatch(refill, index, tensor, "metadata")) return stop(refill);
      } else if (version != frame->saved[index].version) {
        if (is_mismatch(refill, index, tensor, "version")) return stop(refill);
      }
      if (index < refill->external_tensors.size() &&
          is_changed_external_tensor(frame->saved[index], tensor, refill->external_tensors[index]) &&
          is_mismatch(refill, index, tensor, "external_tensor")) {
        return stop(refill);
      }
    }
    call_audit(frame, names().note_again, index, tensor);
    Refilled& entry = refill->values->slots[index];
    entry.tensor = value;
    entry.version_check = VersionCheck(tensor, version, value.ptr());
    entry.state = Refilled::State::kHeld;
    entry.needs_grad = needs_grad;
  }
  if (refill->early_stop && index + 1 >= refill->num_needed) {
    refill->values->first_of_last = index + 1 - std::min(index + 1, kSavedBeforeFilled);
    return stop(refill);
  }
  return value.release().ptr();
}

PyObject* refill_pack(PyObject* self, PyObject* tensor) {
  return guarded([&] { return pack(refill_of(self), tensor); });
}

PyObject* refill_get_frame(PyObject* self, void*) {
  const py::object& frame = refill_of(self)->frame;
  return Py_NewRef(frame ? frame.ptr() : Py_None);
}

PyObject* refill_get_error(PyObject* self, void*) {
  const py::object& error = refill_of(self)->error;
  return Py_NewRef(error ? error.ptr() : Py_None);
}

PyObject* refill_get_num_packed(PyObject* self, void*) { return PyLong_FromSize_t(refill_of(self)->num_packed); }

PyObject* refill_get_num_needed(PyObject* self, void*) { return PyLong_FromSize_t(refill_of(self)->num_needed); }

PyObject* refill_get_has_failed(PyObject* self, void*) {
  return PyBool_FromLong(refill_has_failed(py::reinterpret_borrow<py::object>(self)) ? 1 : 0);
}

PyObject* refill_run_to_the_end(PyObject* self, PyObject*) {
  refill_of(self)->early_stop = false;
  Py_RETURN_NONE;
}

void refill_dealloc(PyObject* self) {
  RefillObject* refill = refill_of(self);
  using OwnedValues = std::unique_ptr<Values>;
  using Versions = std::vector<long long>;
  refill->external_tensors.~Versions();
  refill->values.~OwnedValues();
  refill->error.~object();
  refill->frame.~object();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyMethodDef refill_methods[] = {{"pack", refill_pack, METH_O, "Pack hook of the rerun."},
                                {"run_to_the_end", refill_run_to_the_end, METH_NOARGS, "Do not stop this rerun early."},
                                {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {{"frame", refill_get_frame, nullptr, "The frame that is refilled.", nullptr},
                        {"error", refill_get_error, nullptr, "The first mismatch, or None.", nullptr},
                        {"has_failed", refill_get_has_failed, nullptr, "Whether anything does not match.", nullptr},
                        {"num_packed", refill_get_num_packed, nullptr, "Tensors saved by the rerun.", nullptr},
                        {"num_needed", refill_get_num_needed, nullptr, "Tensors the rerun has to save.", nullptr},
                        {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot refill_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(refill_dealloc)},
                              {Py_tp_methods, refill_methods},
                              {Py_tp_getset, getset},
                              {Py_tp_doc, const_cast<char*>("Collects the values of one rerun.")},
                              {0, nullptr}};
PyType_Spec refill_spec = {"actckpt._C.Refill", sizeof(RefillObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, refill_slots};

// Values were restored for this key before. Either `index` was taken already: values are read a second time. Or it was
// released under memory pressure: what was taken is not needed any more.
void begin_again(RefillObject* refill, const Values& former, std::size_t index) {
  const bool was_given_back =
      former.is_released && index < former.slots.size() && former.slots[index].state == Refilled::State::kMissing;
  refill->values->keep = former.keep || !was_given_back;
  if (refill->values->keep) return;
  for (std::size_t i = 0; i < former.slots.size(); ++i) {
    if (former.slots[i].state == Refilled::State::kTaken) refill->values->slots[i].state = Refilled::State::kTaken;
  }
}

std::size_t count_needed(const FrameObject* frame) {
  std::size_t count = frame->saved.size();
  while (count > 0 && frame->saved[count - 1].slot == nullptr) count -= 1;
  return count;
}

}  // namespace

void call_audit(const FrameObject* frame, PyObject* method, std::size_t index, PyObject* object) {
  if (!frame->recipe.audit) return;
  const py::object audit = frame->recipe.audit;
  call_method_with(audit.ptr(), method, number(static_cast<long long>(index)).ptr(), object);
}

py::object new_refill(FrameObject* frame, std::size_t index, const py::object& key) {
  RefillObject* refill = PyObject_New(RefillObject, refill_type);
  if (refill == nullptr) throw py::error_already_set();
  new (&refill->frame) py::object(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame)));
  new (&refill->error) py::object();
  new (&refill->values) std::unique_ptr<Values>(std::make_unique<Values>());
  new (&refill->external_tensors) std::vector<long long>();
  refill->values->key = key;
  refill->values->slots.resize(frame->saved.size());
  if (const Values* former = frame->find(key.ptr())) begin_again(refill, *former, index);
  refill->num_packed = 0;
  refill->num_needed = count_needed(frame);
  refill->early_stop = frame->recipe.early_stop;
  refill->stopped = false;
  auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(refill));
  if (frame->forward_completed) refill->external_tensors = external_tensor_versions(frame);
  return owner;
}

py::object refill_pack_of(const py::object& refill) { return owned(PyCFunction_New(&refill_methods[0], refill.ptr())); }

namespace {

// TorchScript replaces the exception of a hook by its own error: the pending one may be the stop.
bool is_stop_in_script(PyObject* refill) {
  if (!refill_of(refill)->stopped || PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) return false;
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

bool is_stop_of(PyObject* refill) {
  if (PyErr_ExceptionMatches(stop_rerun) == 0) return is_stop_in_script(refill);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* arguments = PyObject_GetAttrString(value, "args");
  const bool matches =
      arguments != nullptr && PyTuple_GET_SIZE(arguments) == 1 && PyTuple_GET_ITEM(arguments, 0) == refill;
  Py_XDECREF(arguments);
  PyErr_Restore(type, value, traceback);
  return matches;
}

PyObject* refill_frame(const py::object& refill) { return refill_of(refill.ptr())->frame.ptr(); }

bool refill_found_mismatch(const py::object& refill) { return static_cast<bool>(refill_of(refill.ptr())->error); }

bool refill_has_failed(const py::object& object) {
  RefillObject* refill = refill_of(object.ptr());
  if (refill->error) return true;
  return !refill->stopped && frame_of(refill)->forward_completed && refill->num_packed < refill->num_needed;
}

void store_refill(const py::object& object) {
  RefillObject* refill = refill_of(object.ptr());
  store(frame_of(refill), std::move(refill->values));
}

void close_refill(const py::object& object) noexcept {
  RefillObject* refill = refill_of(object.ptr());
  refill->stopped = true;
  // Freed here: that can run Python.
  const py::object frame = std::move(refill->frame), error = std::move(refill->error);
  const std::unique_ptr<Values> values = std::move(refill->values);
}

void add_refill_type(py::module_& module) {
  refill_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&refill_spec));
  if (refill_type == nullptr) throw py::error_already_set();
  stop_rerun = PyErr_NewExceptionWithDoc("actckpt._C.StopRerun", "Everything that a rerun had to bring back is there.",
                                         PyExc_BaseException, nullptr);
  if (stop_rerun == nullptr) throw py::error_already_set();
  module.add_object("Refill", reinterpret_cast<PyObject*>(refill_type));
  module.add_object("StopRerun", stop_rerun);
}

}  // namespace actckpt
