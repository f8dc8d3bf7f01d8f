// The streams of an accelerator's devices, as torch and its allocator know them.
//
// Contract: what differs between accelerators is asked of an `Accelerator` (actckpt/_core/accelerator.py): the handle
// of a device's current stream at every call, the stream object of a handle once. They throw Python errors only. Thread
// rule: GIL held. Ownership: holds the accelerator, and nothing of an engine.

#pragma once

#include <utility>
#include <vector>

#include "core/python.h"
#include "engine/protocol/device_engine.h"

namespace actckpt::python {

class TorchStreams {
 public:
  explicit TorchStreams(const py::object& accelerator);

  const py::object& accelerator() const { return accelerator_; }

  // The stream that is current on a device in this thread.
  Stream current(int device) const;

  // Tells the allocator which streams use the memory of a Bytes object.
  void record(PyObject* bytes, const Uses& uses);

  // New memory on a device, allocated on a stream of it.
  py::object allocate(Stream on, long long nbytes, PyObject* device);

 private:
  py::object at(Stream stream);

  const py::object accelerator_, handle_;
  std::vector<std::pair<Stream, py::object>> known_;
};

void bind_streams(py::module_& module);

}  // namespace actckpt::python
