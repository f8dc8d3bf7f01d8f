// The engine's Python interface, and helpers that the binding files share.
//
// One kind of engine moves all tensors. `DeviceEngine.cuda`: to pinned memory, and to a spill file below it. Streams
// are (device, handle), with the driver library's handle. `DeviceEngine.host`: tensors of the CPU to a spill file;
// their device and stream are 0, and `put` copies before it returns.
//
//   ticket = engine.put(ptr, nbytes, device, stream, alias)    # a DeviceTicket, or why it stays: Kept
//   if not ticket.use(device, other_stream):                   # the same storage is saved on another stream
//       alias.record_stream(other_stream)                      # and the engine holds it no more
//   found = ticket.get(device, stream)                         # (object, record_stream wanted) or None
//   if found is None:                                          # allocate with `stream` current
//       ticket.load(device, stream, buffer.data_ptr(), buffer, urgent=True)
//       found = ticket.get(device, stream)
//   if found[1]:                                               # before the object is used
//       found[0].record_stream(the stream)
//
// To prefetch: allocate with `ticket.put_stream` current, and `load` on it with `urgent=False`; False means that there
// was no need. `unload` releases loaded bytes. `ticket.tier` is "pinned" or "disk". `release(keep, uses)` is called for
// each source that the engine releases: it must call `record_stream` for each use, and must not refer to the engine. It
// may run at any call of the engine and in the garbage collector. TorchStreams do so in C++. EngineStore
// (engine_store.h) does all this for the offload hooks.
//
// `put(..., must=False)` never waits, and returns a Kept instead: FULL, nothing has room; BUSY, no bounce buffer is
// free; BEHIND, copies lag by a window; CAPTURING, the stream is captured into a graph; FAILED and STRANDED, a device
// call failed before, or in this put. With `must` it waits (counted) if bytes that go below pinned memory find no free
// bounce buffer. `why_no_driver(library)` is empty if that library can be opened.
//
// Every error derives from OffloadError. A call in a forked child raises ForkedError. Engines are shut down at
// interpreter exit. Calls that may wait release the GIL.
//
// Contract: each bind_* function adds its classes to the module. NOTE [References]: a KeepAlive of the engine is an
// owned PyObject*. It is taken and dropped with the GIL held, and no lock of the engine.
// Thread rule: GIL held throughout.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "engine/keep_alive.h"

namespace actckpt::python {

namespace py = pybind11;

// All of it.
void bind_engine(py::module_& module);

void bind_memory(py::module_& module);

// An owned reference that is passed to the engine; dropped unless `commit` was called.
class Reference {
 public:
  explicit Reference(const py::object& object) : object_(object.ptr()) { Py_INCREF(object_); }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object_); }

  KeepAlive get() const { return object_; }
  void commit() { object_ = nullptr; }

 private:
  PyObject* object_;
};

inline std::byte* to_pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace actckpt::python
