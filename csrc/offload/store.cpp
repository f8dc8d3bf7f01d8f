#include "offload/store.h"

#include <utility>

#include "offload/bytes.h"

namespace actckpt {
namespace {

class PythonTicket final : public StoreTicket {
 public:
  explicit PythonTicket(py::object ticket) : ticket_(std::move(ticket)) {}

  py::object fetch() override {
    py::object found = call_method(ticket_.ptr(), names().fetch);
    if (!is_bytes(found.ptr())) throw py::type_error("a store gave something else than Bytes");
    return found;
  }
  py::object prefetch() override { return call_method(ticket_.ptr(), names().prefetch); }
  void unload() override { call_method(ticket_.ptr(), names().unload); }
  void saved_again(PyObject* storage) override { call_method(ticket_.ptr(), names().saved_again, storage); }

 private:
  const py::object ticket_;
};

class PythonStore final : public Store {
 public:
  explicit PythonStore(PyObject* store) : store_(store) {}

  std::unique_ptr<StoreTicket> put(const Source& source, bool must) override {
    const py::object nbytes = number(source.nbytes);
    PyObject* stack[] = {store_, source.bytes, nbytes.ptr(), must ? Py_True : Py_False};
    py::object ticket = owned(PyObject_VectorcallMethod(names().put, stack, 3, names().keyword_must));
    return ticket.is_none() ? nullptr : std::make_unique<PythonTicket>(std::move(ticket));
  }

 private:
  PyObject* const store_;
};

// As the hooks put what they save.
std::unique_ptr<StoreTicket> put_bytes(Store* store, const py::object& bytes, long long nbytes, bool must) {
  if (!is_bytes(bytes.ptr())) throw py::type_error("takes Bytes");
  const py::object device = attribute(storage_behind(bytes.ptr()), names().device);
  return store->put({bytes.ptr(), address_of(bytes.ptr()), nbytes, device.ptr()}, must);
}

}  // namespace

std::shared_ptr<Store> store_behind(PyObject* store) {
  if (py::isinstance<Store>(store)) return py::cast<std::shared_ptr<Store>>(py::handle(store));
  return std::make_shared<PythonStore>(store);
}

void add_store_type(py::module_& module) {
  py::class_<StoreTicket>(module, "StoreTicket", "A tensor in a store.")
      .def("fetch", &StoreTicket::fetch, "fetch() -> Bytes, valid for the current stream.")
      .def("prefetch", &StoreTicket::prefetch, "prefetch() -> Bytes that are being loaded, or None.")
      .def("unload", &StoreTicket::unload, "unload(): release loaded bytes.")
      .def(
          "saved_again", [](StoreTicket* self, const py::object& storage) { self->saved_again(storage.ptr()); },
          py::arg("storage"), "saved_again(storage): the same bytes of it were saved again.");
  py::class_<Store, std::shared_ptr<Store>>(module, "NativeStore", "A store that the hooks call directly.")
      .def("put", &put_bytes, py::arg("source"), py::arg("nbytes"), py::kw_only(), py::arg("must") = true,
           py::keep_alive<0, 1>(), "put(source, nbytes, *, must=True) -> StoreTicket, or None if the bytes stay.");
}

}  // namespace actckpt
