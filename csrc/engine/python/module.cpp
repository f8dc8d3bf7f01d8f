// The extension actckpt._engine. Only the files of this folder know Python.

#include "engine/disk/hash.h"
#include "engine/errors.h"
#include "engine/memory/foreign.h"
#include "engine/process_memory.h"
#include "engine/python/bindings.h"
#include "engine/python/device_handles.h"

namespace actckpt::python {

void bind_errors(py::module_& module) {
  const auto& base = py::register_exception<EngineError>(module, "EngineError", PyExc_RuntimeError);
  // Later registrations are tried first, so each class reaches Python as itself.
  py::register_exception<HostPoolFullError>(module, "HostPoolFullError", base);
  const auto& write =
      py::register_exception<SpillWriteError>(module, "SpillWriteError", base);
  py::register_exception<SpillFullError>(module, "SpillFullError", write);
  py::register_exception<SourceGoneError>(module, "SourceGoneError", base);
  py::register_exception<SpillReadError>(module, "SpillReadError", base);
  py::register_exception<ForkedError>(module, "ForkedError", base);
  py::register_exception<ClosedError>(module, "ClosedError", base);
  py::register_exception<DeviceError>(module, "DeviceError", base);
}

}  // namespace actckpt::python

// The extension relies on the GIL. Saying so also fills the macro's variadic argument.
#if PYBIND11_VERSION_HEX >= 0x03010000
#define ACTCKPT_GIL_USED pybind11::mod_gil_used()
#else
#define ACTCKPT_GIL_USED pybind11::mod_gil_not_used(false)
#endif

PYBIND11_MODULE(_engine, module, ACTCKPT_GIL_USED) {
  namespace py = pybind11;
  using namespace actckpt;
  module.doc() = "The offload engine: pointers, byte counts and streams, never a tensor.";
  python::bind_errors(module);
  python::bind_memory(module);
  python::bind_host(module);
  python::bind_device(module);
  python::bind_sim(module);
  // Keeps the GIL: one system call.
  module.def("fix_mmap_threshold", &fix_mmap_threshold, py::arg("nbytes"));
  // Keeps the GIL: a few system calls, once.
  module.def("why_foreign_reads_are_plain", &why_foreign_reads_are_plain);
  // Releases the GIL: reads all bytes.
  module.def(
      "hash64",
      [](std::uintptr_t ptr, std::size_t nbytes) {
        return hash64(python::to_pointer(ptr), nbytes);
      },
      py::arg("ptr"), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>());
}
