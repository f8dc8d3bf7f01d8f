#include "offload/store.h"

#include "offload/bytes.h"

namespace actckpt {
namespace {

// A ticket of a store implemented in Python.
class PythonTicket final : public StoreTicket {
 public:
  PythonTicket(PyObject* store, py::object ticket, py::object nbytes, PyObject* device)
      : store_(store),
        ticket_(std::move(ticket)),
        nbytes_(std::move(nbytes)),
        device_(py::reinterpret_borrow<py::object>(device)) {}

  py::object fetch() override {
    py::object found = call_method_with(store_, names().fetch, ticket_.ptr(), nbytes_.ptr(), device_.ptr());
    if (!is_bytes(found.ptr())) throw py::type_error("a store gave something else than Bytes");
    return found;
  }

  py::object prefetch() override {
    return call_method_with(store_, names().prefetch, ticket_.ptr(), nbytes_.ptr(), device_.ptr());
  }

  void unload() override { call_method_with(ticket_.ptr(), names().unload); }

  void saved_again(PyObject* storage) override {
    call_method_with(store_, names().saved_again, ticket_.ptr(), device_.ptr(), storage);
  }

 private:
  PyObject* const store_;
  const py::object ticket_, nbytes_, device_;
};

class PythonStore final : public Store {
 public:
  explicit PythonStore(PyObject* store) : store_(store) {}

  std::unique_ptr<StoreTicket> put(const Source& source, bool must) override {
    py::object nbytes = number(source.nbytes);
    PyObject* stack[] = {store_, source.bytes, nbytes.ptr(), must ? Py_True : Py_False};
    PyObject* found = PyObject_VectorcallMethod(names().put, stack, 3, names().keyword_must);
    if (found == nullptr) throw_pending();
    auto ticket = py::reinterpret_steal<py::object>(found);
    if (ticket.is_none()) return nullptr;
    return std::make_unique<PythonTicket>(store_, std::move(ticket), std::move(nbytes), source.device);
  }

 private:
  PyObject* const store_;
};

}  // namespace

std::shared_ptr<Store> store_behind(PyObject* store) {
  if (py::isinstance<Store>(store)) return py::cast<std::shared_ptr<Store>>(py::handle(store));
  return std::make_shared<PythonStore>(store);
}

void add_store_type(py::module_& module) {
  py::class_<Store, std::shared_ptr<Store>>(module, "NativeStore", "A store that the hooks call directly.");
}

}  // namespace actckpt
