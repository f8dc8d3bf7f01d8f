#include "replay/unpack.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/meter.h"
#include "core/modes.h"
#include "core/python.h"
#include "core/reads.h"
#include "replay/calls.h"
#include "replay/geometry.h"
#include "replay/needs.h"

namespace actckpt::replay {
namespace {

// Operators executed again by this file since the process began.
long long num_replayed = 0;

bool has_geometry(PyObject* tensor, const Geometry& geometry, const WindowObject* window) {
  const int count = window->num_dims;
  return geometry.num_dims() == count && std::equal(geometry.sizes(), geometry.sizes() + count, sizes_of(window)) &&
         std::equal(geometry.strides(), geometry.strides() + count, strides_of(window)) &&
         reads().storage_offset.number(tensor) == window->offset;
}

// The tensor that a window describes, on the storage of `base`; null where that takes more than strides.
py::object on(PyObject* base, const WindowObject* window) {
  if (window->is_conj != 0 || window->is_neg != 0) return py::object();
  Geometry read(base);
  const Geometry& geometry = read.of(base);
  if (geometry.dtype() != window->dtype || reads().is_neg.is_true(base)) return py::object();
  if (geometry.is_complex() && reads().is_conj.is_true(base)) return py::object();
  if (has_geometry(base, geometry, window)) return reads().detach(base);
  const py::object shape = tuple_of(sizes_of(window), window->num_dims);
  const py::object stride = tuple_of(strides_of(window), window->num_dims);
  const auto offset = py::reinterpret_steal<py::object>(PyLong_FromLongLong(window->offset));
  PyObject* stack[] = {base, shape.ptr(), stride.ptr(), offset.ptr()};
  PyObject* made = PyObject_VectorcallMethod(names().as_strided, stack, 4, nullptr);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// Whether a fresh result is the tensor that a window describes.
bool is_same(PyObject* result, const WindowObject* window) {
  Geometry read(result);
  const Geometry& geometry = read.of(result);
  return window->is_conj == 0 && window->is_neg == 0 && geometry.dtype() == window->dtype &&
         has_geometry(result, geometry, window);
}

bool has_size(PyObject* tensor, const ValueObject* value) {
  const py::object storage = reads().untyped_storage(tensor);
  return reads().nbytes.number(storage.ptr()) == value->nbytes;
}

// Whether both are on one storage. Before a region overwrites a parameter, its bytes are copied elsewhere (Rule 1).
bool is_on_storage_of(PyObject* one, PyObject* other) {
  return reads().untyped_storage(one).ptr() == reads().untyped_storage(other).ptr();
}

// A tensor on the bytes of `value` that nobody changed nor freed, or null (Rules 7 and 8).
PyObject* at_hand(const ValueObject* value) {
  if (!is_none(value->held)) {
    if (version_of(value->held) != value->version) return nullptr;
    return has_size(value->held, value) ? value->held : nullptr;
  }
  return !is_none(value->cached) && version_of(value->cached) == value->cached_version ? value->cached : nullptr;
}

// Whether aliases can be made as things stand; autocast matters to operators only.
bool is_neutral() {
  return call(names().is_grad_enabled).ptr() == Py_False &&
         PyLong_AsLong(call(names().num_function_modes).ptr()) == 0 && PyTuple_GET_SIZE(unknown_modes().ptr()) == 0;
}

// Skips autograd and sets the grad mode of the forward, for one call.
class BelowAutograd {
 public:
  explicit BelowAutograd(bool grad_enabled) : guard_(call(names().below_autograd)), grad_enabled_(grad_enabled) {
    call_method(guard_.ptr(), names().enter);
    if (grad_enabled_) call(names().set_grad_enabled, Py_True);
  }
  BelowAutograd(const BelowAutograd&) = delete;
  BelowAutograd& operator=(const BelowAutograd&) = delete;
  ~BelowAutograd() noexcept {
    py::error_scope pending;
    if (grad_enabled_) call_quietly(names().set_grad_enabled, Py_False);
    PyObject* done = PyObject_CallMethodObjArgs(guard_.ptr(), names().exit, Py_None, Py_None, Py_None, nullptr);
    if (done == nullptr) PyErr_WriteUnraisable(guard_.ptr());
    Py_XDECREF(done);
  }

 private:
  py::object guard_;
  bool grad_enabled_;
};

// Whether a step is one plain operator on values at hand, with windows and immutable arguments only.
bool is_simple(const StepObject* step) {
  if (!is_none(step->random) || !is_none(step->kwargs) || step->written != nullptr || step->outputs == nullptr ||
      PyList_GET_SIZE(step->outputs) != 1) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(step->inputs); ++i) {
    if (at_hand(reinterpret_cast<ValueObject*>(PyList_GET_ITEM(step->inputs, i))) == nullptr) return false;
  }
  return true;
}

// The arguments of a simple step, or null where one takes more than strides.
py::object thawed(const StepObject* step) {
  const Py_ssize_t size = PyList_GET_SIZE(step->args);
  py::tuple args(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* argument = PyList_GET_ITEM(step->args, i);
    py::object item = py::reinterpret_borrow<py::object>(argument);
    if (Py_TYPE(argument) == window_type) {
      const auto* window = reinterpret_cast<WindowObject*>(argument);
      // Held while `on` runs: another thread may end its backward and drop what is cached.
      const auto base = py::reinterpret_borrow<py::object>(at_hand(reinterpret_cast<ValueObject*>(window->value)));
      if (!base) return base;
      item = on(base.ptr(), window);
      if (!item) return item;
    } else if (PyList_CheckExact(argument) && PyList_GET_SIZE(argument) > 0 &&
               PyLong_CheckExact(PyList_GET_ITEM(argument, 0)) == 0) {
      return py::object();  // may have windows inside
    }
    PyTuple_SET_ITEM(args.ptr(), i, item.release().ptr());
  }
  return std::move(args);
}

// Executes the one step that makes `target`; null where that is not simple.
py::object replayed(PyObject* tape, ValueObject* target, long long task) {
  if (is_none(target->step) || call(names().any_autocast_enabled).ptr() != Py_False) return py::object();
  auto* step = reinterpret_cast<StepObject*>(target->step);
  const py::object keep = py::reinterpret_borrow<py::object>(target->step);
  if (!is_simple(step) || !are_numerics(step->numerics)) return py::object();
  const py::object args = thawed(step);
  if (!args) return py::object();
  py::object result;
  {
    const BelowAutograd guard(step->grad_enabled != 0);
    const py::object func = attribute(step->operator_, names().callee);
    PyObject* made = PyObject_Call(func.ptr(), args.ptr(), nullptr);
    if (made == nullptr) throw py::error_already_set();
    result = py::reinterpret_steal<py::object>(made);
  }
  num_replayed += 1;
  const auto* core = reinterpret_cast<TapeObject*>(tape);
  if (PyObject_TypeCheck(result.ptr(), reinterpret_cast<PyTypeObject*>(names().tensor_type)) == 0 ||
      !has_size(result.ptr(), target)) {
    return py::object();  // executed once more in Python, which says what is wrong
  }
  if (!is_none(core->meter)) note_alive(core->meter, reads().untyped_storage(result.ptr()).ptr());
  if (!is_none(target->entry)) {
    reinterpret_cast<EntryObject*>(target->entry)->num_replays += 1;
  }
  const bool has_room = core->window_bytes < 0 || core->cached == nullptr || core->cached->bytes <= core->window_bytes;
  if (task != -1 && has_room && is_asked(target, task)) cache(tape, target, result.ptr(), task);
  return result;
}

// The unpack hook where nothing unusual is about; null where something is.
py::object unpacked(HandleObject* handle) {
  auto* tape = reinterpret_cast<TapeObject*>(handle->tape);
  auto* window = reinterpret_cast<WindowObject*>(handle->window);
  auto* value = reinterpret_cast<ValueObject*>(window->value);
  if (tape->is_open != 0 || !is_none(handle->audit) || !is_neutral() || PySet_GET_SIZE(names().recording) != 0) {
    return py::object();
  }
  py::object base;
  if (PyObject* found = at_hand(value)) {
    base = py::reinterpret_borrow<py::object>(found);
  } else if (!is_none(value->held) || !is_none(value->stored) || !is_none(value->cached)) {
    return py::object();
  }
  const long long previous = handle->task;
  handle->task = PyLong_AsLongLong(call(names().graph_task_id).ptr());
  const bool is_replay = !base;
  if (is_replay) count_needs(tape, handle->task);
  if (is_replay) base = replayed(handle->tape, value, handle->task);
  py::object tensor;
  if (is_replay && base && is_none(value->cached) && is_same(base.ptr(), window)) {
    tensor = base;  // nobody else has it
  } else if (!is_none(handle->alias) && base && is_on_storage_of(base.ptr(), handle->alias)) {
    tensor = reads().detach(handle->alias);
  } else if (base) {
    tensor = on(base.ptr(), window);
  }
  if (!tensor) {
    handle->task = previous;
    return tensor;
  }
  let_go_of_needs(value, handle->task);
  return tensor;
}

// The very object that was saved, where it can be had, else `alias` with its attributes.
py::object as_saved(PyObject* handle, py::object alias) {
  const Original* original = reinterpret_cast<HandleObject*>(handle)->original;
  return original != nullptr ? original->resolved(std::move(alias)) : alias;
}

PyObject* unpack(PyObject*, PyObject* packed) {
  return guarded([&]() -> PyObject* {
    if (Py_TYPE(packed) == handle_type) {
      PyObject* calls = reinterpret_cast<TapeObject*>(reinterpret_cast<HandleObject*>(packed)->tape)->calls;
      if (!is_none(calls)) end_step(calls);
      py::object tensor = unpacked(reinterpret_cast<HandleObject*>(packed));
      if (tensor) return as_saved(packed, std::move(tensor)).release().ptr();
    }
    return PyObject_CallOneArg(names().unpack_slowly, packed);
  });
}

}  // namespace

void add_unpack_functions(py::module_& module) {
  static PyMethodDef methods[] = {{"unpack_recorded", unpack, METH_O, "unpack_recorded(packed)"},
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  module.def("as_saved",
             [](const py::handle& handle, py::object alias) { return as_saved(handle.ptr(), std::move(alias)); });
  module.def("num_replayed", [] { return num_replayed; });
}

}  // namespace actckpt::replay
