#include "record/pack.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "core/python.h"
#include "core/reads.h"
#include "graph/lineage.h"
#include "graph/window.h"
#include "offload/handles.h"
#include "record/arguments.h"
#include "record/decide.h"
#include "record/known_storages.h"
#include "record/module_calls.h"
#include "record/paused.h"
#include "record/unrecorded.h"

namespace actckpt::replay {
namespace {

// Records a checksum of a dropped tensor, unless its place has passed an audit (NOTE [ Audit ]).
void audit(TapeObject* tape, PyObject* handle, PyObject* tensor) {
  tape->num_packed += 1;
  const auto place = mixed(static_cast<std::uint64_t>(tape->structure), tape->num_packed);
  const py::object key = number(static_cast<long long>(place));
  if (tape->audits_always != 0 || PySet_Contains(tape->audited_places, key.ptr()) != 1) {
    call_with(names().begin_audit, reinterpret_cast<PyObject*>(tape), handle, key.ptr(), tensor);
  }
}

// A handle of a leaf that stays in any case. A parameter needs no alias, so nothing is paused.
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
    auto* value = as_value(found);
    if (value != nullptr && value->is_parameter != 0 && value->held == tensor) return pack_leaf(tensor).release().ptr();
    if (value == nullptr) {
      PyObject* other[] = {arguments[0], tensor, is_plain ? Py_True : Py_False};
      return PyObject_Vectorcall(names().pack_other, other, 3, nullptr);
    }
    if (value->was_saved == 0) {
      value->was_saved = 1;
      look_at_saver(tape, value, tensor);
      decide(tape, value, tensor);
    }
    py::object handle = new_handle(arguments[0], window_of(tensor, found.ptr(), &geometry).ptr());
    if (value->is_parameter != 0) {  // it stays: this view of it holds nothing more, as in plain autograd
      assign(reinterpret_cast<HandleObject*>(handle.ptr())->alias, tensor);
    }
    reinterpret_cast<HandleObject*>(handle.ptr())->original = SavedIdentity::of(tensor).release();
    add_handle(value, handle.ptr());
    if (tape->is_audited != 0 && is_none(value->held) && is_none(value->stored)) audit(tape, handle.ptr(), tensor);
    return handle.release().ptr();
  });
}

}  // namespace

void add_pack_functions(py::module_& module) {
  static PyMethodDef methods[] = {{"pack_recorded", fast(pack), METH_FASTCALL, "pack_recorded(tape, tensor)"},
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace actckpt::replay
