// A store over an engine, which the offload hooks call directly: of CPU tensors, or of those of an accelerator.
//
// An accelerator's store knows its streams: put and get are of the stream that is current on the tensor's device in the
// calling thread. actckpt/_offload/notices.py logs which tensors stay, and which writes fail without a loss.
// Thread rule: GIL held; calls that wait release it. Ownership: tickets share the engine; they are used while the
// store's Python object is alive.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "bind/device_handles.h"
#include "bind/torch_streams.h"
#include "offload/store.h"

namespace actckpt::python {

class EngineStore final : public Store {
 public:
  // `accelerator` None: the CPU's.
  EngineStore(std::shared_ptr<DeviceHandle> engine, const py::object& accelerator);

  std::unique_ptr<StoreTicket> put(const Source& source, bool must) override;
  std::shared_ptr<DeviceHandle> engine() const { return engine_; }
  // Makes a device's current stream wait for copies out beyond the window; a CPU has none.
  void make_room(const py::object& device);

  // Null: the CPU's.
  TorchStreams* streams() const { return streams_.get(); }
  // The stream of calls for a device, by its index.
  Stream current(int device) const;
  // Logs new failed writes; what they have stays in bounce buffers.
  void check_writes();

 private:
  int index_of(PyObject* device) const;

  const std::shared_ptr<DeviceHandle> engine_;
  const std::unique_ptr<TorchStreams> streams_;
  std::uint64_t num_told_ = 0;
};

// A ticket of such a store.
class EngineTicket final : public StoreTicket {
 public:
  EngineTicket(EngineStore* store, DeviceTicketPtr ticket, PyObject* device)
      : store_(store),
        handle_(store->engine(), std::move(ticket)),
        device_(py::reinterpret_borrow<py::object>(device)) {}

  py::object fetch() override;
  py::object prefetch() override;
  void unload() override;
  void saved_again(PyObject* storage) override;

  DeviceTicketHandle* inner() { return &handle_; }

 private:
  // The destination, or None if there is no need of one.
  py::object load(Stream on, bool urgent);

  EngineStore* const store_;  // its Python object outlives this
  DeviceTicketHandle handle_;
  const py::object device_;
};

void bind_stores(py::module_& module);

}  // namespace actckpt::python
