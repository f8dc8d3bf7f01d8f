// The engine in the extension. Only the files of this folder use both it and Python.

#include "bind/engine.h"
#include "bind/device_handles.h"
#include "bind/engine_store.h"
#include "bind/torch_streams.h"
#include "engine/errors.h"
#include "engine/process_memory.h"

namespace actckpt::python {
namespace {

template <typename Error>
py::handle bind_error(py::module_& module, const char* name, py::handle base) {
  return py::register_exception<Error>(module, name, base);
}

}  // namespace

void bind_errors(py::module_& module) {
  const py::object root = py::module_::import("actckpt._error_base").attr("ActckptError");
  const py::tuple bases = py::make_tuple(root, py::handle(PyExc_RuntimeError));
  // Later registrations are tried first, so each class reaches Python as itself.
  const py::handle base = bind_error<OffloadError>(module, "OffloadError", bases);
  bind_error<OffloadFullError>(module, "OffloadFullError", base);
  bind_error<OffloadReadError>(module, "OffloadReadError", base);
  bind_error<ForkedError>(module, "ForkedError", base);
}

void bind_engine(py::module_& module) {
  bind_errors(module);
  bind_memory(module);
  bind_streams(module);
  bind_device(module);
  bind_stores(module);
  // Keeps the GIL: one system call.
  module.def("fix_mmap_threshold", &fix_mmap_threshold, py::arg("nbytes"));
}

}  // namespace actckpt::python
