#include "bind/engine_store.h"

#include <exception>
#include <optional>
#include <utility>

#include "core/names.h"
#include "offload/bytes.h"

namespace actckpt::python {
namespace {

// Throws the current engine exception as the registered Python error.
[[noreturn]] void throw_as_python() {
  static auto* const rethrow = new py::cpp_function(
      [](std::uintptr_t error) { std::rethrow_exception(*reinterpret_cast<const std::exception_ptr*>(error)); });
  const std::exception_ptr error = std::current_exception();
  (*rethrow)(reinterpret_cast<std::uintptr_t>(&error));
  std::terminate();
}

// The result of `body`; throws only Python errors.
template <typename Body>
auto in_python(Body body) {
  try {
    return body();
  } catch (const py::error_already_set&) {
    throw;
  } catch (...) {
    throw_as_python();
  }
}

}  // namespace

EngineStore::EngineStore(std::shared_ptr<DeviceHandle> engine, const py::object& accelerator)
    : engine_(std::move(engine)),
      streams_(accelerator.is_none() ? nullptr : std::make_unique<TorchStreams>(accelerator)) {}

std::unique_ptr<StoreTicket> EngineStore::put(const Source& source, bool must) {
  return in_python([&]() -> std::unique_ptr<StoreTicket> {
    check_writes();
    const auto nbytes = static_cast<std::uint64_t>(source.nbytes);
    Put put = engine_->put_bytes(static_cast<std::uintptr_t>(source.address), nbytes, current(index_of(source.device)),
                                 py::reinterpret_borrow<py::object>(source.bytes), must);
    const py::object accelerator = streams_ == nullptr ? py::none() : streams_->accelerator();
    if (put.ticket == nullptr) {
      call_with(names().tell_kept, py::cast(engine_).ptr(), py::cast(put.outcome).ptr(), number(source.nbytes).ptr(),
                accelerator.ptr());
      return nullptr;
    }
    const bool is_told = streams_ != nullptr && put.ticket->is_below;
    auto ticket = std::make_unique<EngineTicket>(this, std::move(put.ticket), source.device);
    if (is_told) call(names().tell_of_disk, accelerator.ptr());
    return ticket;
  });
}

void EngineStore::make_room(const py::object& device) {
  if (streams_ == nullptr) return;  // `put` has copied
  const Stream stream = current(index_of(device.ptr()));
  engine_->make_room(stream.device, stream.handle);
}

int EngineStore::index_of(PyObject* device) const {
  return streams_ == nullptr ? 0 : attribute(device, names().index).cast<int>();
}

Stream EngineStore::current(int device) const {
  return streams_ == nullptr ? Stream{device, 0} : streams_->current(device);
}

void EngineStore::check_writes() {
  const std::uint64_t num_failed = engine_->engine()->num_failed_writes();
  if (num_failed == num_told_) return;
  num_told_ = num_failed;
  call(names().tell_of_writes, py::cast(engine_->stats()).ptr());
}

py::object EngineTicket::fetch() {
  return in_python([this] {
    store_->check_writes();
    const Stream stream = store_->current(handle_.put_stream().first);
    DeviceTicketHandle::Found found = handle_.find(stream);
    while (!found.object) {  // again if another thread unloads in between
      load(stream, true);
      found = handle_.find(stream);
    }
    if (found.record_stream) store_->streams()->record(found.object.ptr(), {stream});
    return found.object;
  });
}

py::object EngineTicket::prefetch() {
  return in_python([this] {
    const auto [device, handle] = handle_.put_stream();
    return load({device, handle}, false);
  });
}

py::object EngineTicket::load(Stream on, bool urgent) {
  const auto nbytes = static_cast<long long>(handle_.nbytes());
  TorchStreams* const streams = store_->streams();
  py::object buffer =
      streams == nullptr ? allocate_bytes(nbytes, device_.ptr()) : streams->allocate(on, nbytes, device_.ptr());
  const auto address = static_cast<std::uintptr_t>(address_of(buffer.ptr()));
  return handle_.load(on.device, on.handle, address, buffer, urgent) ? buffer : py::none();
}

void EngineTicket::unload() {
  in_python([this] { handle_.unload(); });
}

void EngineTicket::saved_again(PyObject* storage) {
  if (store_->streams() == nullptr) return;
  in_python([&] {
    const Stream stream = store_->current(handle_.put_stream().first);
    // Not held on: the graph would hold the source as long as that stream works.
    if (!handle_.use(stream.device, stream.handle)) store_->streams()->record(new_bytes(storage, 0).ptr(), {stream});
  });
}

void bind_stores(py::module_& module) {
  py::class_<EngineTicket, StoreTicket>(module, "EngineTicket")
      .def_property_readonly("inner", &EngineTicket::inner, py::return_value_policy::reference_internal);
  py::class_<EngineStore, Store, std::shared_ptr<EngineStore>>(module, "EngineStore")
      .def(py::init<std::shared_ptr<DeviceHandle>, py::object>(), py::arg("engine"), py::arg("accelerator"))
      .def_property_readonly("engine", &EngineStore::engine)
      .def("make_room", &EngineStore::make_room, py::arg("device"),
           "Make a device's current stream wait for copies out beyond the window; `put` of a CPU tensor has copied.");
}

}  // namespace actckpt::python
