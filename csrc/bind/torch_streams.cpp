#include "bind/torch_streams.h"

#include <cstdint>

#include "offload/bytes.h"

namespace actckpt::python {

TorchStreams::TorchStreams(const py::object& accelerator)
    : accelerator_(accelerator), handle_(accelerator.attr("stream_handle")) {}

Stream TorchStreams::current(int device) const {
  const py::object handle = call(handle_.ptr(), number(device).ptr());
  const unsigned long long value = PyLong_AsUnsignedLongLong(handle.ptr());
  if (PyErr_Occurred() != nullptr) throw_pending();
  return {device, static_cast<std::uintptr_t>(value)};
}

py::object TorchStreams::at(Stream stream) {
  for (const auto& [known, object] : known_) {
    if (known == stream) return object;
  }
  known_.emplace_back(stream, accelerator_.attr("stream_at")(stream.handle, stream.device));
  return known_.back().second;
}

void TorchStreams::record(PyObject* bytes, const Uses& uses) {
  const py::object tensor = tensor_over(bytes);
  for (const Stream& use : uses) {
    call_method(tensor.ptr(), names().record_stream, at(use).ptr());
  }
}

py::object TorchStreams::allocate(Stream on, long long nbytes, PyObject* device) {
  if (current(on.device) == on) return allocate_bytes(nbytes, device);
  return accelerator_.attr("allocate_on")(on.handle, py::handle(device), nbytes);
}

void bind_streams(py::module_& module) {
  py::class_<TorchStreams>(module, "TorchStreams", "What an engine calls for the sources that it releases.")
      .def(py::init<py::object>(), py::arg("accelerator"));
}

}  // namespace actckpt::python
