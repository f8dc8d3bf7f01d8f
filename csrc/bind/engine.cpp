// The engine in the extension. Only the files of this folder know both it and Python.

#include "bind/engine.h"
#include "bind/device_handles.h"
#include "engine/disk/hash.h"
#include "engine/errors.h"
#include "engine/memory/foreign.h"
#include "engine/process_memory.h"

namespace actckpt::python {

void bind_errors(py::module_& module) {
  const auto& base = py::register_exception<EngineError>(module, "EngineError", PyExc_RuntimeError);
  // Later registrations are tried first, so each class reaches Python as itself.
  py::register_exception<HostPoolFullError>(module, "HostPoolFullError", base);
  const auto& write = py::register_exception<SpillWriteError>(module, "SpillWriteError", base);
  py::register_exception<SpillFullError>(module, "SpillFullError", write);
  py::register_exception<SourceGoneError>(module, "SourceGoneError", base);
  py::register_exception<SpillReadError>(module, "SpillReadError", base);
  py::register_exception<ForkedError>(module, "ForkedError", base);
  py::register_exception<ClosedError>(module, "ClosedError", base);
  py::register_exception<DeviceError>(module, "DeviceError", base);
}

void bind_engine(py::module_& module) {
  bind_errors(module);
  bind_memory(module);
  bind_host(module);
  bind_device(module);
  // Keeps the GIL: one system call.
  module.def("fix_mmap_threshold", &fix_mmap_threshold, py::arg("nbytes"));
  // Keeps the GIL: a few system calls, once.
  module.def("why_foreign_reads_are_plain", &why_foreign_reads_are_plain);
  // Releases the GIL: reads all bytes.
  module.def(
      "hash64", [](std::uintptr_t ptr, std::size_t nbytes) { return hash64(to_pointer(ptr), nbytes); }, py::arg("ptr"),
      py::arg("nbytes"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace actckpt::python
