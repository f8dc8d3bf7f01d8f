#include "record/closing.h"

#include <vector>

#include "core/python.h"
#include "core/reads.h"
#include "graph/geometry.h"
#include "graph/objects.h"
#include "record/known_storages.h"

namespace actckpt::replay {
namespace {

bool is_watched(const TapeObject* tape, const ValueObject* value) {
  if (!is_none(tape->outer)) return false;
  return value->action == names().keep || (value->is_input != 0 && value->action != names().offload);
}

// The alias of `value` that the region used last. The tensor that an operator returned may have been an intermediate
// one with its own version counter (`_unsafe_view`).
py::object latest_alias(const ValueObject* value) {
  py::object held = py::reinterpret_borrow<py::object>(value->held);
  if (is_none(value->root)) return held;
  PyObject* seen = referent(value->root);
  if (seen == nullptr || seen == held.ptr()) return held;
  py::object root = py::reinterpret_borrow<py::object>(seen);
  const py::object storage = storage_of(root.ptr(), Geometry(root.ptr()));  // null if it is sparse
  return storage.ptr() == reads().untyped_storage(held.ptr()).ptr() ? root : held;
}

// Holds the bytes of `value` through an alias that counts their changes (NOTE [ Replay ], Rule 6). False: they changed
// unrecorded, and unpack will raise.
bool watch(ValueObject* value) {
  const py::object held = latest_alias(value);
  const py::object root = root_of(held.ptr());
  const long long version = version_of(held.ptr());
  if (value->version < 0 || is_none(value->root) || referent(value->root) != root.ptr()) value->version = version;
  assign(value->held, reads().detach(held.ptr()).ptr());
  return value->version == version;
}

// Releases the graph of parameter views that handles hold. A node that saves the view that it returned, and its handle,
// would otherwise hold each other forever. Safe now, since no recorder sees the view any more.
void cut_off_views(ValueObject* parameter) {
  std::vector<py::object> alive;  // releasing one may destroy others
  for (HandleObject* handle : parameter->handles) {
    if (handle != nullptr) {
      alive.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(handle)));
    }
  }
  for (const py::object& object : alive) {
    auto* handle = reinterpret_cast<HandleObject*>(object.ptr());
    if (is_none(handle->alias) || reads().is_leaf.is_true(handle->alias)) continue;
    assign(handle->alias, reads().detach(handle->alias).ptr());
  }
}

// release_unneeded(tape): releases what no saved tensor needs, and watches the rest. Returns the values that need more
// work in Python.
PyObject* release_unneeded(PyObject*, PyObject* self) {
  return guarded([&]() -> PyObject* {
    auto* tape = reinterpret_cast<TapeObject*>(self);
    py::object holding = py::reinterpret_borrow<py::object>(tape->holding);
    assign(tape->holding, py::list().ptr());
    PyObject* list = holding.ptr();
    // Later values hold earlier ones, so release the last ones first.
    for (Py_ssize_t i = PyList_GET_SIZE(list) - 1; i >= 0; --i) {
      if (Py_REFCNT(PyList_GET_ITEM(list, i)) == 1) {
        Py_INCREF(Py_None);
        if (PyList_SetItem(list, i, Py_None) != 0) throw py::error_already_set();
      }
    }
    const bool is_alone = PySet_GET_SIZE(names().recording) == 0;
    py::list others;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      PyObject* item = PyList_GET_ITEM(list, i);
      if (item == Py_None) continue;
      auto* value = reinterpret_cast<ValueObject*>(item);
      if (value->is_parameter != 0) cut_off_views(value);
      if (is_none(value->held) || value->is_parameter != 0) continue;
      if (!is_none(tape->entries) && is_none(value->entry)) {
        assign(add_entry(tape, value, value->held)->why, names().why_read);
      }
      if (is_alone && is_watched(tape, value)) {
        watch(value);
      } else {
        others.append(py::reinterpret_borrow<py::object>(item));
      }
    }
    return others.release().ptr();
  });
}

}  // namespace

void add_closing_functions(py::module_& module) {
  static PyMethodDef methods[] = {{"release_unneeded", release_unneeded, METH_O, "release_unneeded(tape)"},
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  module.def("latest_alias", [](const py::handle& value) { return latest_alias(as_value(value)); });
  module.def("watch", [](const py::handle& value) { return watch(as_value(value)); });
}

}  // namespace actckpt::replay
