#include "bind/cpu_store.h"

#include <exception>
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

class StoredCpuTicket final : public StoreTicket {
 public:
  StoredCpuTicket(CpuStore* store, CpuTicketPtr ticket, PyObject* device)
      : store_(store),
        handle_(store->engine(), std::move(ticket)),
        device_(py::reinterpret_borrow<py::object>(device)) {}

  py::object fetch() override {
    return in_python([this] {
      store_->check_writes();
      py::object found = handle_.get();
      while (found.is_none()) {  // again if another thread unloads in between
        const py::object buffer = new_buffer();
        found = handle_.load(static_cast<std::uintptr_t>(address_of(buffer.ptr())), buffer);
      }
      return found;
    });
  }

  py::object prefetch() override {
    return in_python([this]() -> py::object {
      py::object buffer = new_buffer();
      if (handle_.prefetch(static_cast<std::uintptr_t>(address_of(buffer.ptr())), buffer)) return buffer;
      return py::none();
    });
  }

  void unload() override {
    in_python([this] { handle_.unload(); });
  }

  void saved_again(PyObject*) override {}

 private:
  py::object new_buffer() const { return allocate_bytes(static_cast<long long>(handle_.nbytes()), device_.ptr()); }

  CpuStore* const store_;  // its Python object outlives this
  CpuTicketHandle handle_;
  const py::object device_;
};

}  // namespace

CpuTicketPtr put_bytes(CpuEngine& engine, const std::byte* source, std::size_t nbytes, const py::object& keep,
                       bool must) {
  Reference reference(keep);
  for (;;) {
    Released released;
    CpuTicketPtr ticket = engine.try_put(source, nbytes, reference.get(), must, &released);
    if (ticket != nullptr) {
      reference.commit();
      drop_references(released);
      return ticket;
    }
    drop_references(released);
    if (!must) return nullptr;
    const py::gil_scoped_release no_gil;
    engine.make_room(nbytes);
  }
}

// Holds the GIL throughout, so that nobody can drop the reference before it is counted here.
py::object CpuTicketHandle::look(bool* busy) {
  Released released;
  const Lookup lookup = engine_->look(ticket_, &released);
  *busy = lookup.found == Found::kBusy;
  py::object kept = py::none();
  if (lookup.keep != nullptr) {
    kept = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(lookup.keep));
  }
  drop_references(released);
  return kept;
}

py::object CpuTicketHandle::get() {
  for (;;) {
    bool busy = false;
    py::object kept = look(&busy);
    if (!busy) {
      return kept;
    }
    const py::gil_scoped_release no_gil;
    engine_->wait(ticket_);
  }
}

bool CpuTicketHandle::prefetch(std::uintptr_t ptr, const py::object& keep) {
  Reference reference(keep);
  Released released;
  const bool taken = engine_->load(ticket_, to_pointer(ptr), reference.get(), false, &released);
  if (taken) {
    reference.commit();
  }
  drop_references(released);
  return taken;
}

py::object CpuTicketHandle::load(std::uintptr_t ptr, const py::object& keep) {
  Reference reference(keep);
  Released released;
  bool taken = false;
  {
    const py::gil_scoped_release no_gil;
    taken = engine_->load(ticket_, to_pointer(ptr), reference.get(), true, &released);
  }
  if (taken) {
    reference.commit();
  }
  drop_references(released);
  return get();
}

void CpuTicketHandle::unload() {
  Released released;
  engine_->unload(ticket_, &released);
  drop_references(released);
}

void CpuTicketHandle::drop() {
  Released released;
  engine_->drop(ticket_, &released);
  drop_references(released);
}

std::unique_ptr<StoreTicket> CpuStore::put(const Source& source, bool must) {
  return in_python([&]() -> std::unique_ptr<StoreTicket> {
    check_writes();
    CpuTicketPtr ticket =
        put_bytes(*engine_, to_pointer(static_cast<std::uintptr_t>(source.address)),
                  static_cast<std::size_t>(source.nbytes), py::reinterpret_borrow<py::object>(source.bytes), must);
    if (ticket == nullptr) return nullptr;
    return std::make_unique<StoredCpuTicket>(this, std::move(ticket), source.device);
  });
}

void CpuStore::check_writes() {
  if (engine_->num_failed_writes() == num_told_) return;
  const CpuStats found = engine_->stats();
  num_told_ = found.num_failed_writes;
  call(names().tell_of_writes, py::cast(found).ptr());
}

}  // namespace actckpt::python
