#include "core/modes.h"

namespace actckpt {
namespace {

PyObject* unknown(PyObject*, PyObject*) {
  return guarded([] { return unknown_modes().release().ptr(); });
}

PyMethodDef modes_functions[] = {
    {"unknown_modes", unknown, METH_NOARGS, "Dispatch modes of this thread that may change what operators return."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

py::object unknown_modes() {
  if (PyLong_AsLong(call(names().num_dispatch_modes).ptr()) == 0) return py::tuple();  // the common case
  return call(names().unknown_modes);
}

void add_mode_functions(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), modes_functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
