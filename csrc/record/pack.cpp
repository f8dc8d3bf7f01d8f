#include "record/pack.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "core/python.h"
#include "core/reads.h"
#include "graph/lineage.h"
#include "graph/window.h"
#include "offload/handles.h"
#include "record/known_storages.h"
#include "record/module_calls.h"
#include "record/paused.h"
#include "record/record.h"
#include "record/unrecorded.h"

namespace actckpt::replay {
namespace {

// Decides what becomes of a value that autograd saves for the first time. False: `Tape.decide` has to.
bool decided(TapeObject* tape, ValueObject* value, PyObject* tensor) {
  if (is_none(value->action) || tape->num_lost != 0) return false;
  const bool recomputes = value->action == names().recompute;
  if (recomputes) {
    if (is_none(value->step) || PyObject_IsTrue(value->why_opaque) == 1) return false;
    if (value->needs_collective == 0 && new_leaf_bytes(value, value->nbytes) > value->nbytes) return false;
    mark_needed(value);
    tape->recompute_bytes += value->nbytes;
  } else if (value->action == names().keep && !is_none(value->held) &&
             (value->is_input != 0 || PyObject_IsTrue(value->why_opaque) == 0)) {
    assign(value->step, Py_None);
    // Tells of later changes as autograd would: aliases may count their own (`Tensor.data`).
    if (value->is_parameter == 0) assign(value->held, tensor);
  } else {
    return false;
  }
  const auto reference =
      py::reinterpret_steal<py::object>(untracked(PyWeakref_NewRef(reinterpret_cast<PyObject*>(value), nullptr)));
  append(tape->saved, reference.ptr());
  if (!is_none(tape->entries) && value->is_parameter == 0) {
    EntryObject* entry = add_entry(tape, value, tensor);
    assign(entry->action, value->action);
    if (value->is_input != 0) assign(entry->why, value->why_opaque);
  }
  return true;
}

// Lets a dropped tensor leave a checksum, unless its place has come back right (Rule 6 of NOTE [ Replay ]).
void audit(TapeObject* tape, PyObject* handle, PyObject* tensor) {
  tape->num_packed += 1;
  const auto place = mixed(static_cast<std::uint64_t>(tape->structure), tape->num_packed);
  const py::object key = number(static_cast<long long>(place));
  if (tape->audits_always != 0 || PySet_Contains(tape->audited_places, key.ptr()) != 1) {
    call_with(names().begin_audit, reinterpret_cast<PyObject*>(tape), handle, key.ptr(), tensor);
  }
}

// A handle of a leaf that stays whatever becomes of the region. Of a parameter no alias is made: nothing to pause for.
py::object pack_leaf(PyObject* tensor) {
  std::optional<Pause> pause;
  const bool is_parameter = reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == names().parameter_type;
  if (!is_parameter || !reads().is_leaf.is_true(tensor)) pause.emplace();
  return new_unmoved(tensor);
}

// pack(tape, tensor): the pack hook.
PyObject* pack(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 2) throw py::type_error("pack takes 2 arguments");
    auto* tape = reinterpret_cast<TapeObject*>(arguments[0]);
    PyObject* tensor = arguments[1];
    const bool is_plain = is_tensor_type(reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
    Geometry geometry(tensor);
    const py::object found = is_plain ? value_of(tape, tensor, geometry) : py::object();
    auto* value = reinterpret_cast<ValueObject*>(found.ptr());
    if (value != nullptr && value->is_parameter != 0 && value->held == tensor) return pack_leaf(tensor).release().ptr();
    if (value == nullptr) {
      PyObject* other[] = {arguments[0], tensor, is_plain ? Py_True : Py_False};
      return PyObject_Vectorcall(names().pack_other, other, 3, nullptr);
    }
    if (value->was_saved == 0) {
      value->was_saved = 1;
      look_at_saver(tape, value, tensor);
      if (!decided(tape, value, tensor)) {
        PyObject* both[] = {arguments[0], found.ptr(), tensor};
        const auto done = owned(PyObject_VectorcallMethod(names().decide, both, 3, nullptr));
      }
    }
    py::object handle = new_handle(arguments[0], window_of(tensor, found.ptr(), &geometry).ptr());
    if (value->is_parameter != 0) {  // it stays: to hold this view of it, as plain autograd does, holds nothing more
      assign(reinterpret_cast<HandleObject*>(handle.ptr())->alias, tensor);
    }
    reinterpret_cast<HandleObject*>(handle.ptr())->original = Original::of(tensor).release();
    add_handle(value, handle.ptr());
    if (tape->is_audited != 0 && is_none(value->held) && is_none(value->stored)) audit(tape, handle.ptr(), tensor);
    return handle.release().ptr();
  });
}

bool is_watched(const TapeObject* tape, const ValueObject* value) {
  if (!is_none(tape->outer)) return false;
  return value->action == names().keep || (value->is_input != 0 && value->action != names().offload);
}

// The tensor on the bytes of `value` that the region used last: what an operator returned may have been an
// intermediate of it with a version counter of its own (`_unsafe_view`).
py::object seen_last(const ValueObject* value) {
  py::object held = py::reinterpret_borrow<py::object>(value->held);
  if (is_none(value->root)) return held;
  PyObject* seen = referent(value->root);
  if (seen == nullptr || seen == held.ptr()) return held;
  py::object root = py::reinterpret_borrow<py::object>(seen);
  const py::object storage = storage_of(root.ptr(), Geometry(root.ptr()));  // none where it is sparse
  return storage.ptr() == reads().untyped_storage(held.ptr()).ptr() ? root : held;
}

// Holds the bytes of `value` through an alias that tells when they change (Rule 7 of NOTE [ Replay ]). False: they
// changed behind the recorder's back, and unpack will raise.
bool watch(ValueObject* value) {
  const py::object held = seen_last(value);
  const py::object root = root_of(held.ptr());
  const long long version = version_of(held.ptr());
  if (value->version < 0 || is_none(value->root) || referent(value->root) != root.ptr()) value->version = version;
  assign(value->held, reads().detach(held.ptr()).ptr());
  return value->version == version;
}

// Releases the graph of the views of a parameter that handles hold: a node that saves the view that it returned
// and its handle would hold each other for good. Now, since no recorder sees it any more.
void cut_off_views(ValueObject* parameter) {
  std::vector<py::object> alive;  // what is released may end others
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

// release_unneeded(tape): releases what no saved tensor needs, and watches what is kept. Returns the values for which
// more is to be done.
PyObject* release_unneeded(PyObject*, PyObject* self) {
  return guarded([&]() -> PyObject* {
    auto* tape = reinterpret_cast<TapeObject*>(self);
    py::object holding = py::reinterpret_borrow<py::object>(tape->holding);
    assign(tape->holding, py::list().ptr());
    PyObject* list = holding.ptr();
    // Later values hold earlier ones: the last go first.
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

void add_pack_functions(py::module_& module) {
  static PyMethodDef methods[] = {{"pack_recorded", fast(pack), METH_FASTCALL, "pack_recorded(tape, tensor)"},
                                  {"release_unneeded", release_unneeded, METH_O, "release_unneeded(tape)"},
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  module.def("seen_last",
             [](const py::handle& value) { return seen_last(reinterpret_cast<ValueObject*>(value.ptr())); });
  module.def("watch", [](const py::handle& value) { return watch(reinterpret_cast<ValueObject*>(value.ptr())); });
  module.def("add_entry", [](const py::handle& tape, const py::handle& value, const py::handle& tensor) {
    add_entry(reinterpret_cast<TapeObject*>(tape.ptr()), reinterpret_cast<ValueObject*>(value.ptr()), tensor.ptr());
    return py::reinterpret_borrow<py::object>(reinterpret_cast<ValueObject*>(value.ptr())->entry);
  });
  module.def("new_leaf_bytes", [](const py::handle& value, long long at_most) {
    return new_leaf_bytes(reinterpret_cast<ValueObject*>(value.ptr()), at_most);
  });
  module.def("mark_needed", [](const py::handle& value) { mark_needed(reinterpret_cast<ValueObject*>(value.ptr())); });
}

}  // namespace actckpt::replay
